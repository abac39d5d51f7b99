"""Curves out of the columns of a run."""

import dataclasses
import json
import math
import re

import pytest
import torch

from attemper.errors import ArgumentError
from attemper.monitor import StepRecord
from attemper.report.runs import RunView
from attemper.report.runs.view import SHOWN
from tests.monitor.runs import alarm, run_of
from tests.monitor.series import layer, record


def records(steps: int) -> list[StepRecord]:
    """Two layers of 3 and 2 heads and, at every other step, a second call of the first one."""
    made = []
    for step in range(steps):
        layers = [
            layer((1.0 + step, 2.0, 40.0 - step), sharpness=(1.0, 2.0 + step / 7, 3.0)),
            layer((5.0, 7.0), name="layers.1.attention"),
            *([layer((3.0, 4.0, 5.0), call=1)] if step % 2 else []),
        ]
        made.append(record(step, *layers, **({"loss": 5.0 - step / 10} | ({"lr": 0.1} if step % 3 == 0 else {}))))
    return made


def same(one: RunView, other: RunView) -> None:
    assert (one.steps, one.info, one.alarms, one.attempt) == (other.steps, other.info, other.alarms, other.attempt)
    assert [(each.name, each.heads) for each in one.layers] == [(each.name, each.heads) for each in other.layers]
    for mine, its in zip(one.layers, other.layers, strict=True):
        for name in SHOWN:
            torch.testing.assert_close(mine.figures[name], its.figures[name], rtol=0, atol=0, equal_nan=True)
    assert one.scalars.keys() == other.scalars.keys()
    for name, values in one.scalars.items():
        torch.testing.assert_close(values, other.scalars[name], rtol=0, atol=0, equal_nan=True)


def test_each_number_is_where_it_belongs() -> None:
    made = records(7)
    view = RunView.of(run_of(made))
    assert view.steps == tuple(range(7))
    assert [(each.name, each.heads) for each in view.layers] == [
        ("layers.0.attention", 3), ("layers.1.attention", 2), ("layers.0.attention#1", 3),
    ]  # fmt: skip
    for number, each in enumerate(view.layers):
        for step in range(7):
            of = made[step].layers
            for name in SHOWN:
                got = each.figures[name][step]
                wanted = of[number].figure(name) if number < len(of) else torch.full((3,), math.nan, dtype=torch.float64)
                torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
    assert view.scalars["loss"].tolist() == [5.0 - step / 10 for step in range(7)]
    assert [math.isnan(value) for value in view.scalars["lr"].tolist()] == [step % 3 != 0 for step in range(7)]


def test_the_worst_head() -> None:
    view = RunView.of(run_of(records(7)))
    values, heads = view.layers[0].worst("max_scaled_product")
    assert values.tolist() == [40.0 - step for step in range(7)]
    assert set(heads.tolist()) == {2}
    lowest, heads = view.layers[0].worst("gain")
    torch.testing.assert_close(lowest, view.layers[0].figures["gain"].amin(-1))
    assert heads.tolist() == view.layers[0].figures["gain"].argmin(-1).tolist()
    assert [math.isnan(value) for value in view.layers[2].worst("gain")[0].tolist()] == [step % 2 == 0 for step in range(7)]


@pytest.mark.parametrize("cut", [1, 4, 6])
def test_a_view_that_is_read_in_parts_is_that_of_the_whole(cut: int) -> None:
    made = records(7)
    made[2] = dataclasses.replace(made[2], alarms=(alarm(2),))
    made[5] = dataclasses.replace(made[5], alarms=(alarm(5),))
    first, second = RunView.of(run_of(made[:cut])), RunView.of(run_of(made[cut:]))
    same(first.then(second, 100), RunView.of(run_of(made)))
    ending = first.then(second, 3)
    assert ending.steps == (4, 5, 6)
    assert [each.step for each in ending.alarms] == [5]
    assert ending.layers[0].figures["gain"].shape == (3, 3)


def test_a_layer_that_changes_its_number_of_heads() -> None:
    made = [record(0, layer((1.0, 2.0))), record(1, layer((1.0, 2.0, 3.0)))]
    whole = RunView.of(run_of(made))
    same(RunView.of(run_of(made[:1])).then(RunView.of(run_of(made[1:])), 9), whole)
    assert math.isnan(whole.layers[0].figures["max_scaled_product"][0, 2])


def test_a_run_without_steps_or_layers() -> None:
    nothing = RunView.of(run_of([]))
    assert (nothing.steps, nothing.layers) == ((), ())
    same(nothing.then(RunView.of(run_of(records(3))), 9), RunView.of(run_of(records(3))))
    bare = RunView.of(run_of([record(0, loss=1.0), record(1)]))
    assert (bare.steps, bare.layers) == ((0, 1), ())


def test_globs_choose_layers_and_their_alarms() -> None:
    made = records(3)
    made[1] = dataclasses.replace(made[1], alarms=(alarm(1), alarm(1, layer="layers.1.attention")))
    view = RunView.of(run_of(made)).only(["*.1.*"])
    assert [each.name for each in view.layers] == ["layers.1.attention"]
    assert [each.layer for each in view.alarms] == ["layers.1.attention"]
    with pytest.raises(ArgumentError, match=re.escape("layers: got 'x*'; expected a glob that fits one of layers.0.attention, ")):
        RunView.of(run_of(made)).only(["x*"])


def test_as_json() -> None:
    made = [record(4, layer((math.inf, 2.0)), loss=3.0)]
    data = json.loads(json.dumps(RunView.of(run_of(made)).to_dict(), allow_nan=False))
    assert data["layers"][0]["figures"]["max_scaled_product"] == ["inf", 2.0]
    assert data["steps"] == {"first": 4, "last": 4, "logged": 1}
    assert data["scalars"] == {"loss": 3.0}
    assert RunView.of(run_of([])).to_dict()["steps"] is None
