"""The page of `trainer report` in a real browser, where there is one."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.pages import parse
from tests.trainer.cli.test_report import noisy, start, write_run
from trainer.cli import main

CHROMIUM = shutil.which("chromium")
DARK, LIGHT = 0, 1

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")

# What a person would see, asked of the browser by a copy of the page.
ASK = """
const color = text => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
const style = element => getComputedStyle(element);
const seen = name => [...document.querySelectorAll("." + name)].filter(
  e => e.getClientRects().length > 0 && style(e).display != "none").length;
const answers = {
  dark: matchMedia("(prefers-color-scheme: dark)").matches,
  fetched: performance.getEntriesByType("resource").map(e => e.name),
  pairs: ["h1", ".soft", ".chart text", "a", ".bad", "b.status", ".kind"].map(name => {
    const e = document.querySelector(name), text = e.tagName == "text";
    const behind = e.closest(".chart, .scroll, .events") || document.body;
    return [name, color(style(e)[text ? "fill" : "color"]), color(style(behind).backgroundColor)];
  }),
  lines: [...document.querySelectorAll(".axis-step .plain .curve, .axis-step .ema-06 .curve")]
    .map(e => color(style(e).stroke)),
  card: color(style(document.querySelector(".chart")).backgroundColor),
  sizes: [...document.querySelectorAll(".axis-step svg")].map(e => {
    const box = e.getBoundingClientRect(); return [box.width, box.height]; }),
  width: [document.documentElement.scrollWidth, innerWidth],
  shown: {},
};
for (const radio of document.querySelectorAll("input[name=ema]")) {
  radio.click();
  const raw = document.querySelector(".axis-step .raw");
  answers.shown[radio.id] = [seen("ema-06"), seen("ema-09"), seen("ema-099"), style(raw).opacity];
}
for (const radio of document.querySelectorAll("input[name=axis]")) {
  radio.click();
  answers.shown[radio.id] = [seen("axis-step"), seen("axis-time"), seen("axis-epoch")];
}
document.title = JSON.stringify(answers);
"""


def browse(page: Path, *options: str, scheme: int = LIGHT, width: int = 1400) -> tuple[str, str]:
    """Open a page; what the browser made of it, and what it had to say."""
    profile = page.with_suffix(f".{scheme}-{width}")
    done = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            "--host-resolver-rules=MAP * ~NOTFOUND",  # its own services too
            *("--enable-logging=stderr", "--hide-scrollbars", f"--window-size={width},1600"),
            *(f"--user-data-dir={profile}", f"--blink-settings=preferredColorScheme={scheme}"),
            *("--dump-dom", *options, page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout, done.stderr


def ask(page: Path, **options: int) -> dict:
    """The answers of a copy of a page that may run a script."""
    text = page.read_text()
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    assert policy in text
    text = text.replace(policy, f"{policy}; script-src 'unsafe-inline'")
    copy = page.with_name("copy.html")
    copy.write_text(text.replace("</body>", f"<script>{ASK}</script></body>"))
    seen, _ = browse(copy, **options)
    return json.loads(parse(seen.replace("<!DOCTYPE html>", "")).all("title")[0].text)


def complaints(said: str) -> list[str]:
    """The lines that the browser wrote to the console of the page."""
    return [line for line in said.splitlines() if "CONSOLE" in line]


def contrast(one: list[float], other: list[float]) -> float:
    """Of two colours, from 1 to 21: Web Content Accessibility Guidelines 2.2, contrast ratio."""

    def luminance(color: list[float]) -> float:
        parts = [c / 255 for c in color]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    about = {"starts": [start(0, 30, "finished")], "configuration": {"seed": 1}}
    runs = [write_run(folder / f"run-{i}", noisy(60, seed=i), about=about) for i in range(8)]
    record = runs[0] / "metrics.jsonl"
    record.write_text(f'{{"step": 0, "epoch": 0, "train/loss": "NaN"}}\n{record.read_text()}')
    assert main(["report", *map(str, runs), "--output", str(folder / "page.html")]) == 0
    return folder / "page.html"


def test_the_page_opens_without_a_complaint_and_without_the_network(page, tmp_path):
    dom, said = browse(page)
    assert dom.count("<svg") == page.read_text().count("<svg") == 3
    assert complaints(said) == []
    # The page's own policy would tell of anything that it tried to fetch.
    other = tmp_path / "other.html"
    other.write_text(page.read_text().replace("<main>", '<main><img src="https://example.org/a">'))
    (told,) = complaints(browse(other)[1])
    assert "https://example.org/a" in told


def test_in_light_and_dark_everything_is_readable_and_the_buttons_work(page):
    backgrounds = {}
    for scheme, least in ((LIGHT, 4.5), (DARK, 4.5)):
        seen = ask(page, scheme=scheme)
        assert seen["dark"] == (scheme == DARK)
        assert seen["fetched"] == []
        for name, ink, paper in seen["pairs"]:
            assert contrast(ink, paper) >= least, name
        colors = seen["lines"]
        assert len(colors) == len(set(map(tuple, colors))) == 8  # one a run
        assert min(contrast(color, seen["card"]) for color in colors) >= 3
        assert all(width > 300 and height > 100 for width, height in seen["sizes"])
        shown = seen["shown"]
        assert shown["ema-0"] == [0, 0, 0, "1"]
        assert shown["ema-06"] == [8, 0, 0, "0.28"]
        assert shown["ema-09"] == [0, 8, 0, "0.28"]
        assert shown["ema-099"] == [0, 0, 8, "0.28"]
        assert shown["axis-step"] == [1, 0, 0]
        assert shown["axis-time"] == [0, 1, 0]
        assert shown["axis-epoch"] == [0, 0, 1]
        backgrounds[scheme] = seen["pairs"][0][2]
    assert sum(backgrounds[LIGHT]) > 700
    assert sum(backgrounds[DARK]) < 100


def test_a_narrow_window_needs_no_scrolling_sideways(page):
    seen = ask(page, width=500)
    content, window = seen["width"]
    assert content <= window
    assert all(300 < width <= window for width, _ in seen["sizes"])
