"""Dashboards get few numbers, finite ones, under names that stay the same and are not shared."""

import dataclasses
import logging
import math

import pytest
import torch

from attemper.monitor import FIGURES, StepRecord
from attemper.monitor.trackers.heatmap import heatmap
from attemper.monitor.trackers.summary import Summary
from tests.monitored import layer_of, record_of


def renamed(*names: tuple[str, int]) -> StepRecord:
    layers = tuple(dataclasses.replace(layer_of("blocks.0.attn", 0), layer=name, call=call) for name, call in names)
    return StepRecord(0, 0.0, layers)


def layer_parts(scalars: dict[str, float]) -> list[str]:
    return list(dict.fromkeys(tag.split("/")[1] for tag in scalars if tag.count("/") == 2))


def test_scalars_are_the_worst_head_and_the_mean() -> None:
    record = record_of(2)
    scalars = Summary(500, "T").scalars(record)
    assert all(type(value) is float for value in scalars.values())
    for tag, layer in zip(("model", "blocks.0.attn", "blocks.1.attn", "blocks.1.attn-call1"), record.layers, strict=True):
        stats = layer.stats
        assert scalars[f"attention/{tag}/max_logit"] == max(stats.max.tolist())
        assert scalars[f"attention/{tag}/max_scaled_product"] == max(layer.scaled_max.tolist())
        assert scalars[f"attention/{tag}/entropy"] == min(stats.mean_entropy.tolist())
        assert scalars[f"attention/{tag}/mean_gain"] == pytest.approx(sum(stats.mean_gain.tolist()) / stats.heads)
    assert scalars["attention/max_logit"] == max(max(layer.stats.max.tolist()) for layer in record.layers)
    assert scalars["attention/gain"] == min(min(layer.stats.mean_gain.tolist()) for layer in record.layers)
    assert (scalars["attention/alarms"], scalars["watch/loss"]) == (0.0, 1.0)
    assert len(scalars) == 3 + 6 + 4 * 9
    means = {f"mean_{name}" for name in ("entropy", "normalized_entropy", "gain")}
    figures = {figure.name for figure in FIGURES if figure.scalar}
    assert {tag.rpartition("/")[2] for tag in scalars} == {"alarms", "nonfinite_rows", "loss"} | figures | means


def test_a_layer_without_rows_has_no_scalars_and_hides_no_other() -> None:
    scalars = Summary(500, "T").scalars(record_of(1))
    assert layer_parts(scalars) == ["model", "blocks.0.attn", "blocks.1.attn"]
    assert all(math.isfinite(value) for value in scalars.values())


def test_what_is_not_finite_is_left_out_and_counted() -> None:
    record = record_of(0)
    record.layers[1].stats.extremes[0, 3] = math.inf
    record.layers[1].stats.counts[4, 2] = 7
    scalars = Summary(500, "T").scalars(dataclasses.replace(record, scalars={"loss": math.nan, "a/rate": 0.5}))
    assert "watch/loss" not in scalars
    assert scalars["watch/a/rate"] == 0.5
    assert math.isfinite(scalars["attention/blocks.0.attn/max_logit"])
    assert scalars["attention/nonfinite_rows"] == 7.0


def test_names_are_made_fit_and_stay_apart() -> None:
    names = [("", 0), ("model", 0), ("a.b", 0), ("a/b", 0), ("a_b", 0), ("a_b", 1), ("..", 0), ("é <x>", 0)]
    summary = Summary(500, "T")
    for _ in range(2):
        assert layer_parts(summary.scalars(renamed(*names))) == [
            *("model", "model-2", "a.b", "a_b", "a_b-2", "a_b-call1", "__", "___x_"),
        ]


def test_of_many_layers_evenly_spaced_ones_get_scalars_and_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    names = [(f"h.{number}", 0) for number in range(11)]
    summary = Summary(8 + 3 * 9, "Some")
    with caplog.at_level(logging.WARNING, logger="attemper"):
        for _ in range(3):
            scalars = summary.scalars(renamed(*names))
            assert layer_parts(scalars) == ["h.0", "h.5", "h.10"]
            assert len(scalars) <= 8 + 3 * 9
    (said,) = caplog.records
    assert said.message.startswith("Some: 3 of 11 layers have scalars of their own (most=35); attention/FIGURE is over all")
    assert layer_parts(Summary(1, "None").scalars(renamed(*names))) == []


def test_a_layer_that_comes_later_gets_scalars_while_there_is_room() -> None:
    summary = Summary(8 + 2 * 9, "T")
    assert layer_parts(summary.scalars(renamed(("a", 0)))) == ["a"]
    assert layer_parts(summary.scalars(renamed(("b", 0), ("c", 0), ("a", 0)))) == ["b", "a"]


def test_a_heatmap_has_a_row_a_layer_and_a_column_a_head() -> None:
    record = record_of(1)  # in which the last layer has no rows; the first has three heads and the others five
    figure = next(figure for figure in FIGURES if figure.name == "max_logit")
    drawn = heatmap(record, figure)
    assert drawn is not None
    assert drawn.image.dtype == torch.uint8
    assert drawn.image.shape == (3, 4 * drawn.cell, 5 * drawn.cell)
    cells = drawn.image[:, drawn.cell // 2 :: drawn.cell, drawn.cell // 2 :: drawn.cell]
    grey = (cells == 128).all(0)
    assert grey.tolist() == [[False] * 3 + [True] * 2, [False] * 5, [False] * 5, [True] * 5]
    table = torch.stack(
        [torch.nn.functional.pad(layer.stats.max, (0, 5 - layer.stats.heads), value=-math.inf) for layer in record.layers]
    )
    high, low = divmod(int(table.argmax()), 5), divmod(int(table.nan_to_num(math.inf, neginf=math.inf).argmin()), 5)
    assert (drawn.high, drawn.low) == (float(table[high]), float(table[low]))
    assert cells[:, *high].tolist() == [253, 231, 37]
    assert cells[:, *low].tolist() == [68, 1, 84]


def test_shares_are_drawn_between_zero_and_one_and_nothing_is_drawn_of_nothing() -> None:
    figure = next(figure for figure in FIGURES if figure.name == "gain")
    drawn = heatmap(record_of(0), figure)
    assert drawn is not None
    assert (drawn.low, drawn.high) == (0.0, 1.0)
    assert heatmap(StepRecord(0, 0.0, ()), figure) is None
