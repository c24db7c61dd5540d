"""Looking at a page in headless Chromium, where there is one."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    None,
)

_MEASURE = """<script>addEventListener("load", () => {
  const box = e => { const r = e.getBoundingClientRect(); return [r.top, r.bottom, r.width] };
  const found = {
    title: document.querySelector("h1").innerText,
    titleSize: parseFloat(getComputedStyle(document.querySelector("h1")).fontSize),
    titleBox: box(document.querySelector("h1")),
    figureBox: box(document.querySelector("img")),
    pictures: [...document.images].map(i => [i.complete, i.naturalWidth, i.alt]),
    width: document.documentElement.scrollWidth,
    window: innerWidth,
    fold: innerHeight,
    loaded: performance.getEntriesByType("resource").map(r => r.name)
      .filter(name => !name.startsWith("data:")),
  };
  document.body.setAttribute("data-found", JSON.stringify(found));
});</script>"""


def look(page: Path, width: int = 1280, height: int = 900) -> dict[str, Any]:
    """What a browser makes of a page: sizes, places, pictures."""
    copy = page.with_name("measured.html")
    copy.write_text(page.read_text() + _MEASURE)
    dom = _chromium(copy, width, height, "--dump-dom")
    return json.loads(unescape(re.search(r'data-found="([^"]*)"', dom)[1]))


def screenshot(page: Path, to: Path, width: int = 1280, height: int = 900) -> None:
    """The first screen of a page as PNG."""
    _chromium(page, width, height, f"--screenshot={to}")


def _chromium(page: Path, width: int, height: int, *options: str) -> str:
    assert CHROMIUM is not None
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        f"--user-data-dir={page.parent / 'chromium'}",
        f"--window-size={width},{height}",
        *(*options, page.resolve().as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout
