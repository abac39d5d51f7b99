"""The page of a run: what it holds, that nothing extreme is lost, and how large it gets."""

import copy
import dataclasses
import json
import math
import re
from html.parser import HTMLParser

import pytest
import torch
import vl_convert

from attemper.checker import BY_CODE
from attemper.report.page import charts
from attemper.report.page.run_curves import FIGURES, Thinning, heads_data, layers_data, run_data
from attemper.report.page.run_page import run_page
from attemper.report.runs import LayerCurves, RunView
from attemper.report.runs.view import SHOWN
from tests.monitor import series
from tests.monitor.runs import INFO, alarm, run_of
from tests.report.page import pages, runs


@pytest.mark.parametrize("steps", [1, 2, 15, 16, 17, 31, 33, 100, 1009])
@pytest.mark.parametrize("points", [16, 20])
def test_no_extreme_is_lost(steps: int, points: int) -> None:
    curves = torch.randn(steps, 3, dtype=torch.float64)
    curves[torch.rand(steps, 3) < 0.1] = math.nan
    thinning = Thinning.of(steps, points)
    thinned = thinning.apply(curves)
    assert len(thinning.places) == len(thinned) <= max(points, 2)
    assert list(thinning.places) == sorted(thinning.places)
    assert thinning.places[-1] < steps
    for first in range(0, steps, thinning.size):
        bucket = curves[first : first + thinning.size]
        kept = (
            thinned[first // thinning.size * 2 : first // thinning.size * 2 + 2]
            if thinning.size > 1
            else thinned[first : first + 1]
        )
        for column, both in zip(bucket.mT, kept.mT, strict=True):
            known = column[~column.isnan()]
            assert sorted(both[~both.isnan()].unique().tolist()) == sorted(
                {float(x) for x in (known.min(), known.max())} if len(known) else []
            )


def test_extremes_come_in_the_order_in_which_they_were() -> None:
    curves = torch.tensor([[1.0, 3.0, 2.0, 5.0, 9.0, 0.0] * 4]).mT
    thinning = Thinning.of(24, 8)
    assert thinning.size == 6
    assert thinning.apply(curves)[:, 0].tolist() == [9.0, 0.0] * 4


def large(steps: int, layers: int, heads: int) -> RunView:
    """Noise, which no compression makes small."""
    noise = {name: torch.rand(steps, heads, dtype=torch.float64) * 2000 for name in SHOWN}
    made = [LayerCurves(f"layers.{number}", 0, heads, noise) for number in range(layers)]
    told = tuple(alarm(step, layer="layers.0", head=step % heads) for step in range(0, steps, 10))
    return RunView(INFO, tuple(range(steps)), tuple(made), {"loss": torch.rand(steps, dtype=torch.float64)}, told)


@pytest.mark.parametrize(("steps", "layers", "heads", "most"), [(10_000, 12, 12, 2e6), (300, 80, 64, 3e6)])
def test_a_page_stays_small(steps: int, layers: int, heads: int, most: float) -> None:
    text = run_page(large(steps, layers, heads), BY_CODE)
    assert len(text.encode()) < most
    assert ("of every 40 logged steps" in text) == (steps == 10_000)


def test_the_data_are_the_runs() -> None:
    view = runs.view()
    data = run_data(view, ["0", "1", "2"])
    assert data["steps"] == list(view.steps)
    assert data["scalars"]["loss"] == pytest.approx(view.scalars["loss"].tolist(), rel=6e-3)
    curves = runs.unpacked(layers_data(view))
    for shown in FIGURES:
        for layer, curve in zip(view.layers, curves[shown.key], strict=True):
            assert curve == pytest.approx(layer.worst(shown.key)[0].tolist(), rel=6e-3)
    assert runs.unpacked(heads_data(view.layers[1], Thinning.of(len(view.steps), 512)))["gain"][2] == pytest.approx(
        view.layers[1].figures["gain"][:, 2].tolist(), rel=6e-3
    )


def test_a_largest_logit_of_nothing_but_nan_is_nan_and_not_harmless() -> None:
    view = runs.nothing_but_nan()
    assert view.layers[0].all_nan().tolist() == [[False, False], [False, True]]
    curves = runs.unpacked(heads_data(view.layers[0], Thinning.of(2, 16)))
    values = run_data(view, ["0"])["layers"][0]["values"]
    for key in ("max_scaled_product", "max_logit"):
        assert values[key][1] == curves[key][1][1] == "nan"
        assert isinstance(values[key][0], int)
    assert values["gain"][1] is None
    both = dataclasses.replace(
        view.layers[0], figures={name: each[:, 1:] for name, each in view.layers[0].figures.items()}, heads=1
    )
    assert runs.unpacked(layers_data(dataclasses.replace(view, layers=(both,))))["max_logit"][0][1] == "nan"
    assert runs.unpacked(layers_data(view))["max_logit"][0][1] == 0


class Words(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.words, self.skip, self.data = [], 0, ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.skip += tag in ("script", "style")
        assert not [name for name, _ in attrs if name.startswith("on") or name in ("src", "style", "srcset")]

    def handle_endtag(self, tag: str) -> None:
        self.skip -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self.skip:
            self.words.append(data)


def words(page: str) -> str:
    return " ".join(" ".join(Words(page).words).split())


def test_what_is_said_without_scripts() -> None:
    text = words(run_page(runs.view(), BY_CODE, name="runs/one.jsonl"))
    for part in (
        "3 alarms in 40 logged steps, 1 error.",
        "read from runs/one.jsonl",
        "ATT502 logit-above-1e3-in-training",
        "head 1 is large",
    ):
        assert part in text
    assert "No alarm in 40 logged steps." in words(run_page(runs.view(alarms=False)))


def test_a_run_without_steps_is_a_page_too() -> None:
    page = run_page(RunView.of(run_of([])))
    assert "No step has been logged yet." in words(page)
    assert len(page) < 30_000


def test_there_is_no_unescaped_text_of_a_run() -> None:
    page = run_page(runs.hostile(), BY_CODE, name=" ".join(pages.HOSTILE))
    text = re.sub(r"<script.*?</script>|<style.*?</style>", "", page, flags=re.DOTALL)
    for hostile in pages.HOSTILE[:3]:
        assert hostile not in text
    assert "&lt;/script&gt;&lt;script&gt;window.pwned=1" in text
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
    assert json.loads(data)["layers"][0]["heads"] == 2


def test_a_loss_that_became_nan_is_shown() -> None:
    made = [series.record(step, series.layer((1.0,)), loss=2.0 if step < 3 else math.nan) for step in range(5)]
    assert re.search(r"loss\s+nan", words(run_page(RunView.of(run_of(made)))))


def test_an_axis_writes_its_numbers_in_one_way() -> None:
    chart = copy.deepcopy(charts.curves("linear"))
    for name, domain in (("x", [0, 9]), ("y", [40, 160])):
        (scale,) = [each for each in chart["scales"] if each["name"] == name]
        scale["domain"] = domain
    labels = re.findall(r">([^<>]+)</text>", vl_convert.vega_to_svg(chart))
    assert [label for label in labels if len(label) > 1 and label != "step"] == ["40", "60", "80", "100", "120", "140", "160"]
