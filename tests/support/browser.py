"""Open pages in Chromium, without a window, and measure them."""

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")

# For each frame and each radio button of it, chosen one by one: is anything wider than it?
MEASURE = """
addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map((frame) => {
    const page = frame.contentDocument, root = page.documentElement;
    const choices = [...page.querySelectorAll("input[type=radio]")];
    const widths = (choices.length ? choices : [root]).map((one) => {
      if (one !== root) one.click();
      const shown = [...page.querySelectorAll("section")].filter((s) => s.offsetHeight);
      const drawn = [...page.querySelectorAll("svg.diagram")].filter(
        (s) => s.getBoundingClientRect().height);
      return {width: root.scrollWidth, sections: shown.map((s) => s.id),
              diagrams: drawn.map((s) => s.getAttribute("class"))};
    });
    const ground = frame.contentWindow.getComputedStyle(page.body).backgroundColor;
    return {window: frame.contentWindow.innerWidth, ground, widths};
  });
  document.body.innerHTML = "";
  document.body.append(Object.assign(document.createElement("pre"),
    {id: "found", textContent: JSON.stringify(found)}));
});
"""


def browser() -> str:
    """Return the browser of this machine; skip the test if there is none."""
    for name in BROWSERS:
        path = shutil.which(name)
        if path is not None:
            return path
    pytest.skip("no Chromium here: the page is not opened (Debian: apt install chromium)")


def measured(page: str, widths: list[int], where: Path, *, dark: bool) -> list[Any]:
    """Return what MEASURE finds in windows of these widths; fail if the console speaks."""
    frames = [
        f'<iframe srcdoc="{escape(page)}" width="{width}" height="700" '
        'style="border:0"></iframe>'
        for width in widths
    ]
    wrapper = where / "wrapper.html"
    script = f"<script>{MEASURE}</script>"
    wrapper.write_text(
        f'<!doctype html><meta charset="utf-8"><body>{"".join(frames)}{script}</body>'
    )
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    ran = subprocess.run(
        [
            browser(), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
            "--enable-logging=stderr", f"--user-data-dir={where / 'browser'}",
            *scheme, wrapper.as_uri(),
        ],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "CONSOLE" not in ran.stderr, ran.stderr
    found = re.search(r'<pre id="found">([^<]*)</pre>', ran.stdout)
    assert found is not None, ran.stderr
    return json.loads(unescape(found[1]))
