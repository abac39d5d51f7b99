"""The page in a browser: what a reader sees, reaches by keys, and what a hostile checkpoint cannot make it do."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Browser, expect

from attemper.report import Report, Severity
from attemper.report.layout import number
from attemper.report.page import check_page
from attemper.report.page.charts import RAMPS
from tests.browser import Visit, grave_faults, visit
from tests.report.page import pages

pytestmark = pytest.mark.slow


@pytest.fixture
def opened(show: Callable[..., Visit]):
    """A function that opens a report's page."""

    def open_page(report: Report, **options) -> Visit:
        return show(check_page(report), **options)

    return open_page


def find(opened: Visit, layer: str, head: int) -> tuple[float, float]:
    """Where the cell of a head is, found as a reader does: by what the tooltip says."""
    code = """(words) => {
        const canvas = document.querySelector("#map canvas");
        canvas.scrollIntoView({ block: "center" });
        const box = canvas.getBoundingClientRect();
        for (let y = box.top + 5; y < box.bottom; y += 10) for (let x = box.left + 5; x < box.right; x += 10) {
            canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: x, clientY: y, bubbles: true }));
            const tip = document.getElementById("tip");
            if (!tip.hidden && tip.firstChild.textContent === words) return [x, y];
        }
        return null;
    }"""
    found = opened.page.evaluate(code, f"{layer}, head {head}")
    assert found, f"no cell says {layer}, head {head}"
    return found


def drawn(opened: Visit) -> None:
    """Wait until the map stands as it was last asked for."""
    opened.page.wait_for_selector('#map[aria-busy="false"]')


def figures(opened: Visit) -> dict[str, str]:
    lines = opened.page.locator("#head-figures > div")
    return {line.get_attribute("data-key"): line.locator("dd").inner_text() for line in lines.all()}


def colour(opened: Visit, x: float, y: float) -> str:
    """The colour beside the middle of a cell, where no mark is."""
    code = """([x, y]) => {
        const canvas = document.querySelector("#map canvas");
        const box = canvas.getBoundingClientRect();
        const ratio = canvas.width / box.width;
        const at = [(x - box.x) * ratio, (y - box.y) * ratio];
        const parts = [...canvas.getContext("2d").getImageData(...at, 1, 1).data].slice(0, 3);
        return parts.map((part) => part.toString(16).padStart(2, "0"));
    }"""
    return "#" + "".join(opened.page.evaluate(code, [x, y]))


def test_a_click_shows_a_heads_figures_as_the_record_has_them(opened) -> None:
    report = pages.report(pages.finding(message="heads 1 and 2: measured."))
    shown = opened(report)
    assert shown.text("#head-title") == "Head 1"  # that of the finding
    shown.page.mouse.click(*find(shown, "layers.3.attention", 2))
    expect(shown.page.locator("#head-title")).to_have_text("Head 2")
    assert shown.text("#head-place") == "layers.3.attention · scale 0.125 · seen by sdpa"
    stats = report.rows[3].stats
    said = figures(shown)
    assert said["max"] == number(float(stats.max[2]))
    assert said["min"] == number(float(stats.min[2]))
    assert said["headroom_float16"] == f"{number(float(stats.headroom(torch.float16)[2]))}×"
    assert said["mean_gain"] == f"{float(stats.mean_gain[2]):.4f}"
    assert said["saturated_share"] == f"{float(stats.saturated_share[2]):.1%}"
    assert said["rows"] == str(int(stats.rows[2]))
    assert "—" not in said.values()
    assert shown.page.locator("#head-findings > *").count() == 0
    assert shown.page.locator("#head-histograms canvas").count() == 4
    shown.page.mouse.click(*find(shown, "layers.1.attention", 2))
    shown.page.wait_for_selector("#head-findings > *")
    assert "heads 1 and 2: measured." in shown.text("#head-findings")
    assert "a remedy" in shown.text("#head-findings")


def test_the_strong_colour_is_the_worst_head_of_the_figure_chosen(opened) -> None:
    report = pages.report()
    shown = opened(report)
    ramp = RAMPS["light"]

    def worst(key: str, values: list[torch.Tensor], largest: bool) -> tuple[float, float]:
        shown.page.select_option("#figure", key)
        drawn(shown)
        flat = [(float(value), layer, head) for layer, each in enumerate(values) for head, value in enumerate(each)]
        _, layer, head = max(flat) if largest else min(flat)
        x, y = find(shown, f"layers.{layer}.attention", head)
        return x + 1, y + 1

    assert colour(shown, *worst("max", [row.stats.max for row in report.rows], True)) == ramp[-1]
    assert (
        colour(shown, *worst("headroom_float16", [row.stats.headroom(torch.float16) for row in report.rows], False)) == ramp[-1]
    )
    x, y = worst("mean_gain", [row.stats.mean_gain for row in report.rows], False)
    assert "Gradient gain 0." in shown.page.locator("#tip").text_content()
    assert colour(shown, x, y) != ramp[-1]  # 0 would be, and no head is there
    assert shown.text("#definition").startswith("Gradient gain: mean of 1 − Σp²")


def test_keys_reach_everything(opened) -> None:
    shown = opened(pages.report())
    keyboard = shown.page.keyboard
    for _ in range(60):
        keyboard.press("Tab")
        if shown.page.evaluate("document.activeElement.id") == "map":
            break
    else:
        raise AssertionError("Tab never reaches the map")
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowLeft", "ArrowRight", "ArrowRight", "ArrowUp"):
        keyboard.press(key)
    expect(shown.page.locator("#spoken")).to_have_text(re.compile(r"^layers\.1\.attention, head 2\. Largest logit \d"))
    keyboard.press("Home")
    keyboard.press("PageDown")
    expect(shown.page.locator("#head-place")).to_have_text(re.compile(r"^layers\.4\.attention"))
    assert shown.text("#head-title") == "Head 0"
    assert shown.page.url.endswith("#head-4-0")


def test_a_findings_link_leads_to_its_head(opened) -> None:
    shown = opened(pages.report(pages.finding(module="layers.2.attention", heads=(0, 2))))
    shown.page.get_by_role("link", name="layers.2.attention, head 2").click()
    expect(shown.page.locator("#head-title")).to_have_text("Head 2")
    assert shown.text("#head-place").startswith("layers.2.attention")


def test_a_link_to_a_head_opens_there(opened) -> None:
    shown = opened(pages.report(), fragment="#head-3-1")
    expect(shown.page.locator("#head-title")).to_have_text("Head 1")
    assert shown.text("#head-place").startswith("layers.3.attention")


def test_the_map_is_there_as_a_table(opened) -> None:
    report = pages.report()
    shown = opened(report)
    shown.page.locator("#as-table summary").click()
    cells = shown.page.locator("#as-table tbody tr").nth(4).locator("td")
    expect(cells).to_have_text([number(value) for value in report.rows[4].stats.max.tolist()])
    shown.page.select_option("#figure", "mean_peak")
    expect(cells).to_have_text([f"{value:.4f}" for value in report.rows[4].stats.mean_peak.tolist()])


def test_light_and_dark(opened) -> None:
    shown = opened(pages.report(), theme="dark")
    paper = "getComputedStyle(document.documentElement).backgroundColor"
    dark, before = shown.page.evaluate(paper), colour(shown, *find(shown, "layers.0.attention", 0))
    shown.page.get_by_role("button", name="switch between light and dark").click()
    drawn(shown)
    assert dark == "rgb(20, 19, 24)"
    assert shown.page.evaluate(paper) == "rgb(248, 247, 244)"
    assert colour(shown, *find(shown, "layers.0.attention", 0)) != before
    shown.page.reload()
    shown.page.wait_for_selector("html[data-ready]", state="attached")
    assert shown.page.evaluate(paper) == "rgb(248, 247, 244)"


def test_severities_are_marked_as_chosen(opened) -> None:
    shown = opened(pages.report(pages.finding(), pages.finding("ATT302", Severity.INFO, module="layers.0.attention")))
    boxes = {box.inner_text().strip(): box.locator("input").is_checked() for box in shown.page.locator("#severities label").all()}
    assert boxes == {"warning": True, "info": False}
    picture = "document.querySelector('#map canvas').toDataURL()"
    before = shown.page.evaluate(picture)
    shown.page.get_by_label("info").check()
    drawn(shown)
    assert shown.page.evaluate(picture) != before


@pytest.mark.parametrize("make", [pages.broken, pages.shared, pages.hostile], ids=lambda make: make.__name__)
def test_every_head_of_every_layer_can_be_looked_at(opened, make) -> None:
    report = make()
    shown = opened(report, width=420)
    for layer, row in enumerate(report.rows):
        for head in range(row.stats.heads):
            shown.page.evaluate(f"location.hash = '#head-{layer}-{head}'")
            expect(shown.page.locator("#head-title")).to_have_text(f"Head {head}")
    for key in shown.page.locator("#figure option").evaluate_all("all => all.map((each) => each.value)"):
        shown.page.select_option("#figure", key)
        drawn(shown)
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= 420


def test_what_there_is_no_number_for(opened) -> None:
    shown = opened(pages.broken(), fragment="#head-0-1")
    expect(shown.page.locator("#head-title")).to_have_text("Head 1")
    said = figures(shown)
    assert (said["max"], said["mean_gain"], said["rows"], said["empty_rows"]) == ("−inf", "—", "0", "3")
    assert shown.page.locator("#head-histograms >> text=no row to show").count() == 4
    labels = shown.page.locator("#figure option").all_inner_texts()
    assert labels[-2:] == ["Empty rows", "Rows not finite"]


def test_a_hostile_checkpoint_runs_nothing(opened) -> None:
    shown = opened(pages.hostile())
    assert shown.page.evaluate("window.pwned") is None
    assert shown.page.locator("img, style:not(head style)").count() == 0
    assert shown.page.locator("script:not([type='application/json'])").count() == 3
    text = shown.text("body")
    for visible in (
        "</script><script>window.pwned=1;alert(1)</script>",
        "{{ 7 * 7 }}",
        "\\u202egpj",
        "\\x1b]0;t\\x07",
        "&lt;b&gt;",
    ):
        assert visible in text
    assert not set("\u202e\u2066\x1b\x07") & set(text)


def test_what_got_past_the_escaping_would_not_run_either(browser: Browser, tmp_path: Path) -> None:
    text = check_page(pages.report())
    planted = "<script>window.pwned=1</script><img src='https://example.org/a.png' onerror='window.pwned=1'><style>p{}</style>"
    (tmp_path / "page.html").write_text(text.replace("</main>", f"{planted}</main>"), "utf-8")
    shown = visit(browser, tmp_path / "page.html")
    assert shown.page.evaluate("window.pwned") is None
    stopped = {violation.split()[0] for violation in shown.violations}
    assert {"script-src-elem", "img-src", "style-src-elem"} <= stopped
    shown.page.context.close()


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (pages.report(rows=()), "Nothing to check: no attention call was seen."),
        (pages.report(), "Nothing found in 5 attention calls."),
        (pages.report(rows=(pages.row(0, heads=1),)), "Nothing found in 1 attention call."),
    ],
    ids=["no rows", "no findings", "one head"],
)
def test_little_to_show(opened, report: Report, words: str) -> None:
    shown = opened(report, scripts=bool(report.rows))
    assert shown.text("h1") == words


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(opened, theme: str) -> None:
    shown = opened(pages.report(pages.finding(), pages.finding("ATT201", Severity.ERROR)), theme=theme)
    shown.page.locator("#as-table summary").click()
    assert not grave_faults(shown)
