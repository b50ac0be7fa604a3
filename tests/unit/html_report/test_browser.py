"""The page of a report in a headless Chromium: nothing is wider than the window, and nothing is requested."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from hpcsync.html_report.page import render
from tests.unit.html_report import pages

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (400, 1000, 1600)
MEASURE = """<script>addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map(({contentWindow: page}) => ({
    window: page.innerWidth,
    width: page.document.scrollingElement.scrollWidth,
    height: page.document.scrollingElement.scrollHeight,
    requested: page.performance.getEntriesByType("resource").map((entry) => entry.name),
  }));
  document.body.textContent = "measured: " + JSON.stringify(found) + " end";
})</script>"""

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium")


class Measured(NamedTuple):
    """Width of the window, and size and requests of the page in it."""

    window: int
    width: int
    height: int
    requested: list[str]


def measured(folder: Path, *views: tuple[str, int]) -> list[Measured]:
    """Return what pages become in windows of these widths: each a frame, since windows have a smallest width."""
    frames = (
        f'<iframe style="width: {width}px; border: 0" srcdoc="{html.escape(text)}"></iframe>' for text, width in views
    )
    file = folder / "measured.html"
    file.write_text(f"<!DOCTYPE html><body>{''.join(frames)}{MEASURE}</body>", encoding="utf-8")
    assert BROWSER is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command = [BROWSER, *flags, "--dump-dom", file.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True).stdout
    found = re.search(r"measured: (.*) end", dom)
    assert found, dom[-500:]
    return [Measured(**each) for each in json.loads(html.unescape(found[1]))]


def test_nothing_overflows_and_nothing_is_requested_at_any_width(tmp_path: Path) -> None:
    runs = pages.variants(tmp_path)
    name = "an-option-with-a-name-that-does-not-fit-into-a-narrow-window=[0.02,0.02,0.02,0.02,0.02,0.02,0.04]"
    text = render({name: {"bsp": runs["bsp"], f"dssp {name}": runs["dssp"]}})
    everything_open = text.replace("<details>", "<details open>")
    added = '<p style="width: 450px">wide</p><img src="http://127.0.0.1:9/a.png"></main>'
    control = text.replace("</main>", added)
    views = [(page, width) for page in (text, everything_open) for width in WIDTHS]
    *found, wide = measured(tmp_path, *views, (control, 400))
    assert [each.window for each in found] == [*WIDTHS, *WIDTHS]
    for each in found:
        assert each.width <= each.window
        assert each.height > 2000
        assert each.requested == []
    assert found[3].height > found[0].height  # the tables were open
    assert wide.width > wide.window
    assert wide.requested == ["http://127.0.0.1:9/a.png"]
