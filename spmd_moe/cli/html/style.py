"""The colours and rules of the page and of its diagrams: light, dark and on paper."""

# Pairs of text and ground have a contrast of at least 4.5, which a test computes.
LIGHT = {
    "ground": "#ffffff", "text": "#1b1f24", "quiet": "#57606a", "line": "#8a939d",
    "card": "#f6f8fa", "bad": "#b3261e", "bar": "#2f6fb3",
    "dense": "#eaf2fb", "dense-line": "#2f6fb3",
    "sparse": "#fdf1e3", "sparse-line": "#a65a00",
    "forward": "#0b5a2b", "backward": "#8a2a7a",
}  # fmt: skip
DARK = {
    "ground": "#14181d", "text": "#e6e9ed", "quiet": "#a3acb6", "line": "#6b7580",
    "card": "#1d232a", "bad": "#ff9b93", "bar": "#6aa9e9",
    "dense": "#18283a", "dense-line": "#6aa9e9",
    "sparse": "#35271a", "sparse-line": "#e0a15a",
    "forward": "#7fd6a0", "backward": "#e3a3d8",
}  # fmt: skip
# (text, ground) that occur.
PAIRS = [
    (text, ground)
    for ground in ("ground", "card", "dense", "sparse")
    for text in ("text", "quiet", "bad", "forward", "backward")
]


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
COLOURS = (
    f":root{{color-scheme:light dark;{_variables(LIGHT)}}}\n"
    "@media screen and (prefers-color-scheme:dark)"
    f"{{:root{{{_variables(DARK)}}}}}\n"
)

DIAGRAM = f"""\
.diagram text{{font:11px {MONO};fill:var(--text)}}
.diagram .name,.diagram .mesh{{font:600 12.5px system-ui,sans-serif}}
.diagram text.state{{fill:var(--quiet)}}
.diagram text.forward{{fill:var(--forward)}}
.diagram text.backward{{fill:var(--backward)}}
.diagram text.end{{text-anchor:end}}
.diagram .mesh0>rect,.diagram .swatch.mesh0{{fill:var(--dense);stroke:var(--dense-line)}}
.diagram .mesh1>rect,.diagram .swatch.mesh1{{fill:var(--sparse);stroke:var(--sparse-line)}}
.diagram .collective>rect{{stroke-width:2}}
.diagram .edge{{fill:none;stroke:var(--line);stroke-width:1.5}}
.diagram .edge.crosses{{stroke:var(--sparse-line);stroke-width:2.5}}
.diagram .head{{fill:var(--line)}}
.diagram .head.crosses{{fill:var(--sparse-line)}}
"""

PAGE = f"""\
*{{box-sizing:border-box}}
body{{margin:0 auto;padding:1rem;max-width:60rem;background:var(--ground);
  color:var(--text);font:1rem/1.5 system-ui,sans-serif;overflow-wrap:break-word}}
h1{{font-size:1.5rem;line-height:1.25}} h2{{font-size:1.2rem;margin-top:2rem}}
h3{{font-size:1rem;margin:1.5rem 0 .5rem}}
.quiet,figcaption,.caption{{color:var(--quiet);font-size:.875rem}}
.bad{{color:var(--bad);font-weight:600}}
fieldset{{border:1px solid var(--line);border-radius:6px;margin:1.5rem 0 0;
  display:flex;flex-wrap:wrap;gap:.25rem 1rem}}
label{{padding:.5rem .25rem;cursor:pointer}}
figure{{margin:0}}
.diagram{{display:block;width:100%;height:auto;margin:.5rem auto}}
.diagram.narrow{{max-width:26rem}} .diagram.wide{{display:none}}
.box{{overflow-x:auto;margin:.5rem 0}}
.box:focus-visible{{outline:2px solid var(--bar)}}
table{{border-collapse:collapse;font:.8125rem/1.4 {MONO}}}
.caption{{margin:.5rem 0}}
th,td{{padding:.2rem .75rem .2rem 0;text-align:left;vertical-align:top;
  white-space:pre;border-bottom:1px solid var(--card)}}
thead th{{border-bottom:1px solid var(--line)}}
tbody th{{font-weight:400}}
.number{{text-align:right}}
pre{{overflow-x:auto;background:var(--card);padding:.75rem;border-radius:6px;
  font:.8125rem/1.4 {MONO}}}
.ranks{{display:grid;grid-template-columns:repeat(auto-fill,minmax(15rem,1fr));
  gap:1rem;padding:0;margin:.5rem 0}}
.rank{{background:var(--card);border-radius:6px;padding:.5rem .75rem}}
.rank h4{{margin:0 0 .25rem;font-size:.875rem}}
.bars{{display:block;width:100%;height:auto}}
.bars text{{font:11px {MONO};fill:var(--text)}} .bars rect{{fill:var(--bar)}}
@media (min-width:48rem){{.diagram.narrow{{display:none}} .diagram.wide{{display:block}}}}
@media print{{body{{max-width:none}} fieldset{{display:none}}
  .box,pre{{overflow:visible}} pre,th,td{{white-space:pre-wrap}}
  .rank,tr,.diagram{{break-inside:avoid}}}}
"""
