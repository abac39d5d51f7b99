"""Charts that stand still: whose curve is whose can be told from the drawing."""

import re

import pytest

from attemper.report.sweeps import Answer, Chart, HeatMap, Series, SweepView

pytest.importorskip("altair")
pytest.importorskip("vl_convert")


@pytest.mark.parametrize("banded", [True, False])
@pytest.mark.parametrize("count", [1, 13])
def test_every_curve_has_a_look_of_its_own_and_stands_in_the_legend(count: int, banded: bool) -> None:
    from attemper.report.page.drawings import drawn

    x = (0.0, 1.0)
    series = tuple(
        Series(f"arm {place}", x, (place, place + 1.0), *([(place - 0.2, place + 0.8), (place + 0.2, place + 1.2)] * banded))
        for place in range(count)
    )
    for drawing in drawn(Chart("a", "x", "y", series)).values():
        texts = re.findall(r"<text[^>]*>([^<]*)", drawing)
        assert [text for text in texts if text.startswith("arm")] == [each.name for each in series]
        looks = re.findall(r'<path[^>]* stroke="([^"]*)" stroke-width="2" stroke-dasharray="([^"]*)"', drawing)
        assert len(looks) == len(set(looks)) == count
        keys = re.findall(r'<path[^>]* stroke="([^"]*)" stroke-width="2.5" stroke-dasharray="([^"]*)"', drawing)
        assert keys == looks
        bands = re.findall(r'<path[^>]* fill="([^"]*)" opacity="0.16"', drawing)
        assert bands == [color for color, _ in looks] * banded


def test_the_name_of_an_arm_cannot_write_into_the_page() -> None:
    from attemper.report.page.sweep_page import sweep_page

    name = "</svg><script>\x1b\u202e"
    chart = Chart("a", "x", "y", (Series(name, (0.0, 1.0), (1.0, 2.0)),))
    heat = HeatMap("a", (name,), (name,), ((1.0,),), "nats")
    page = sweep_page(SweepView("a", "b?", Answer("c", "d", charts=(chart,), maps=(heat,)), (), "e", 1, 1.0, "f"))
    assert "</svg><script>" not in page
    assert "&lt;/svg&gt;&lt;script&gt;" in page
    assert "\x1b" not in page
    assert "\u202e" not in page
