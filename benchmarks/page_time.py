"""How long the report page of 100 layers with 128 heads takes to open in a headless Chromium: under 1 s until all of it is drawn.

The page says itself when it was ready, by `performance.now()`: from the start of navigation to the frame after the map, the
figures and the histograms of the first head. Each time it is opened by a browser that was started for it.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from playwright.sync_api import sync_playwright

from attemper.report import LayerRow, Report
from attemper.report.page import check_page
from attemper.stats import HeadStats, RowStats
from tests.browser import ARGUMENTS, chromium, visit

BAR = 1.0  # seconds
LAYERS, HEADS = 100, 128


def made_up() -> Report:
    """A report of random logits, with a spread from head to head as trained models have it."""
    generator = torch.Generator().manual_seed(20261129)
    rows = []
    for layer in range(LAYERS):
        spread = torch.exp(torch.randn(HEADS, 1, 1, generator=generator))
        logits = torch.randn(1, HEADS, 128, 32, generator=generator) * spread
        stats = HeadStats.from_rows(RowStats.from_logits(logits))
        rows.append(LayerRow(f"model.layers.{layer}.self_attn", 0, "sdpa", stats, 0.125))
    return Report(model="random", inputs="random", dtype="float32", rows=tuple(rows), findings=())


def seconds_to_open(file: Path) -> float:
    """Seconds until the page says that it is ready, in a fresh browser."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=list(ARGUMENTS))
        opened = visit(browser, file)
        opened.assert_quiet()
        milliseconds = float(opened.page.locator("html").get_attribute("data-ready") or "nan")
        browser.close()
    return milliseconds / 1000


def main(runs: int = 7) -> int:
    """Print the median; 0 if the bar is held, 1 if not."""
    if chromium() is None:
        raise SystemExit("no chromium is installed, so nothing was timed; on Debian: apt-get install chromium")
    report = made_up()
    began = time.perf_counter()
    text = check_page(report)
    written = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        file.write_text(text, "utf-8")
        seconds = [seconds_to_open(file) for _ in range(runs)]
    median = statistics.median(seconds)
    print(
        f"page of {LAYERS} × {HEADS} heads: opens in {median:.2f} s (median of {runs}, fastest {min(seconds):.2f}; "
        f"bar {BAR:.0f} s); {len(text.encode()) / 1e6:.1f} MB, made in {written:.1f} s"
    )
    return int(median >= BAR)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
