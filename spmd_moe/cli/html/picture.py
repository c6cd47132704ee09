"""Print the picture of the README, docs/layer.svg: `make docs` writes it."""

from spmd_moe.checks.configurations import all_configurations
from spmd_moe.checks.presets import preset_of
from spmd_moe.checks.trace import Workload, trace
from spmd_moe.cli.check_options import FIRST, torch_dtype
from spmd_moe.cli.check_rows import title_of
from spmd_moe.cli.degrees import parse_parallel
from spmd_moe.cli.html.boxes import boxes_of
from spmd_moe.cli.html.diagram import WIDE, diagram
from spmd_moe.cli.html.style import COLOURS, DIAGRAM

GROUND = "svg{background:var(--ground)}\n"


def picture() -> str:
    """Trace the layer that `spmd-moe check` begins with, and draw it."""
    preset = preset_of(FIRST)
    work = Workload(preset.batch, preset.seq, torch_dtype(preset.dtype))
    every = all_configurations(preset.config, parse_parallel(preset.mesh)).found
    found = trace(preset.config, next(iter(every.values())), work)
    boxes = boxes_of(found.crossings, found.gradient_sums)
    drawn = diagram(boxes, "layer", WIDE, title_of(found))
    head, rest = drawn.split("<defs>", 1)
    return f"{head}<style>\n{COLOURS}{DIAGRAM}{GROUND}</style><defs>{rest}\n"


if __name__ == "__main__":
    print(picture(), end="")
