"""The page of a run in a browser: curves, the map at any step, keys, and what a hostile run cannot make it do."""

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from attemper.checker import BY_CODE
from attemper.report.page.run_page import run_page
from attemper.report.runs import RunView
from tests.browser import Visit, grave_faults
from tests.report.page import runs

pytestmark = pytest.mark.slow


@pytest.fixture
def opened(show: Callable[..., Visit]):
    """A function that opens a run's page."""

    def open_page(view: RunView, **options) -> Visit:
        return show(run_page(view, BY_CODE, name="a run"), **options)

    return open_page


def drawn(shown: Visit) -> None:
    for box in ("map", "curves", "head-curves"):
        shown.page.wait_for_selector(f'#{box}[aria-busy="false"]')


def figures(shown: Visit) -> dict[str, str]:
    return {
        line.get_attribute("data-key"): line.locator("dd").inner_text()
        for line in shown.page.locator("#head-figures > div").all()
    }


def test_it_opens_at_the_head_with_the_gravest_alarm(opened) -> None:
    shown = opened(runs.view())
    assert shown.text("h1") == "3 alarms in 40 logged steps, 1 error."
    assert shown.text("#head-title") == "Head 1"
    assert shown.text("#head-place") == "layers.0.attention, 3 heads"
    assert figures(shown)["max_scaled_product"] == "2000"
    label = shown.page.locator("#curves").get_attribute("aria-label")
    assert label == "Largest |scale·q·k| over steps 0 to 39; at the end from 7 (layers.1.attention) to 2000 (layers.0.attention)"
    assert (
        shown.page.locator("#scalar-0").get_attribute("aria-label")
        == "loss over steps 0 to 39; at the end from 3.05 (loss) to 3.05 (loss)"
    )


def test_the_pointer_says_which_line_it_is(opened) -> None:
    shown = opened(runs.view())
    box = shown.page.locator("#curves canvas").bounding_box()
    shown.page.mouse.move(box["x"] + box["width"] - 14, box["y"] + 8)  # the end of the line that grows
    text = shown.page.locator("#tip").inner_text().splitlines()
    assert text[:2] == ["layers.0.attention", "step 39: 2000"]
    shown.page.mouse.move(5, 5)
    expect(shown.page.locator("#tip")).to_be_hidden()


def test_the_map_at_another_step(opened) -> None:
    shown = opened(runs.view())
    picture = "document.querySelector('#map canvas').toDataURL()"
    before = shown.page.evaluate(picture)
    shown.page.locator("#at-step").focus()
    shown.page.keyboard.press("Home")
    expect(shown.page.locator("#which-step")).to_have_text("step 0")
    expect(shown.page.locator('#head-figures [data-key="max_scaled_product"] dd')).to_have_text("2")
    drawn(shown)
    assert shown.page.evaluate(picture) != before
    shown.page.keyboard.press("End")
    expect(shown.page.locator('#head-figures [data-key="max_scaled_product"] dd')).to_have_text("2000")


def test_another_figure_and_another_head(opened) -> None:
    shown = opened(runs.view())
    shown.page.select_option("#figure", "gain")
    drawn(shown)
    assert shown.text("#definition").startswith("Gradient gain: mean of 1 − Σp²")
    assert (shown.page.locator("#curves").get_attribute("aria-label") or "").startswith("Gradient gain over steps 0 to 39")
    shown.page.locator("#map").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        shown.page.keyboard.press(key)
    expect(shown.page.locator("#spoken")).to_have_text(re.compile(r"^layers\.2\.attention, head 2\. Gradient gain 0\.\d"))
    assert shown.page.url.endswith("#head-2-2")
    expect(shown.page.locator("#head-place")).to_have_text("layers.2.attention, 3 heads")


def test_an_alarm_leads_to_its_head(opened) -> None:
    shown = opened(runs.view(), fragment="#head-2-0")
    expect(shown.page.locator("#head-place")).to_have_text("layers.2.attention, 3 heads")
    shown.page.get_by_role("link", name="36").click()
    expect(shown.page.locator("#head-place")).to_have_text("layers.0.attention, 3 heads")
    assert shown.text("#head-title") == "Head 1"


def test_a_head_of_nothing_but_nan_says_so(opened) -> None:
    shown = opened(runs.nothing_but_nan(), fragment="#head-0-1")
    expect(shown.page.locator("#head-title")).to_have_text("Head 1")
    drawn(shown)
    assert figures(shown)["max_logit"] == figures(shown)["max_scaled_product"] == "nan"
    assert figures(shown)["gain"] == "—"
    ends = shown.page.locator("#head-curves").get_attribute("aria-label") or ""
    assert ends.endswith("over steps 0 to 1; at the end from 3 (head 0) to 3 (head 0)")


def test_light_and_dark(opened) -> None:
    shown = opened(runs.view(), theme="dark")
    picture = "document.querySelector('#curves canvas').toDataURL()"
    before = shown.page.evaluate(picture)
    shown.page.get_by_role("button", name="switch between light and dark").click()
    shown.page.wait_for_function(f"(before) => {picture} !== before", arg=before)


@pytest.mark.parametrize("make", [runs.broken, runs.hostile], ids=lambda make: make.__name__)
def test_nonsense_and_hostility(opened, make) -> None:
    view = make()
    shown = opened(view, width=420)
    for key in shown.page.locator("#figure option").evaluate_all("all => all.map((each) => each.value)"):
        shown.page.select_option("#figure", key)
        drawn(shown)
    for layer, each in enumerate(view.layers):
        for head in range(each.heads):
            shown.page.evaluate(f"location.hash = '#head-{layer}-{head}'")
            expect(shown.page.locator("#head-title")).to_have_text(f"Head {head}")
    assert shown.page.evaluate("window.pwned") is None
    assert shown.page.locator("img, style:not(head style)").count() == 0
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= 420


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(opened, theme: str) -> None:
    shown = opened(runs.view(), theme=theme)
    shown.page.locator("#as-table summary").click()
    assert not grave_faults(shown)
