"""Heads: what rows reduce to, and that parts add up to the whole."""

import json
import math

import pytest
import torch
from torch import Tensor

from attemper import HeadStats, RowStats
from attemper.errors import ArgumentError
from attemper.stats import HISTOGRAM_EDGES, RowsByHead

BATCH, HEADS, QUERIES, KEYS = 3, 5, 7, 11


def problem(factor: float = 2.0) -> tuple[Tensor, Tensor]:
    logits = factor * torch.randn(BATCH, HEADS, QUERIES, KEYS, dtype=torch.float64)
    visible = torch.rand(BATCH, HEADS, QUERIES, KEYS) > 0.3
    visible[0, :, 2] = False  # an empty row
    visible[1, :, 4] = torch.arange(KEYS) == 3  # a row with one key
    return logits, visible


def by_hand(rows: RowStats, query_mask: Tensor | None) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"max": [], "min": [], "gain": [], "entropy": [], "saturated": [], "rows": [], "centred": []}
    for head in range(HEADS):
        figures: dict[str, list[float]] = {name: [] for name in found}
        several: list[tuple[float, bool]] = []
        for batch in range(BATCH):
            for query in range(QUERIES):
                if query_mask is not None and not query_mask[batch, query]:
                    continue
                place = (batch, head, query)
                if rows.count[place] == 0:
                    continue
                figures["max"].append(rows.max[place].item())
                figures["min"].append(rows.min[place].item())
                figures["gain"].append(1.0 - rows.p2[place].item())
                figures["centred"].append(rows.max[place].item() - rows.mean[place].item())
                if rows.count[place] > 1:
                    count, peak = rows.count[place].item(), math.exp(rows.max[place].item() - rows.lse[place].item())
                    several.append((rows.entropy[place].item() / math.log(count), peak > 0.99))
        found["rows"].append(len(figures["max"]))
        found["max"].append(max(figures["max"]))
        found["min"].append(min(figures["min"]))
        found["centred"].append(max(figures["centred"]))
        found["gain"].append(sum(figures["gain"]) / len(figures["gain"]))
        found["entropy"].append(sum(e for e, _ in several) / len(several))
        found["saturated"].append(sum(s for _, s in several) / len(several))
    return found


@pytest.mark.parametrize("padded", [False, True])
def test_records_reduced_together_are_those_reduced_alone(padded: bool) -> None:
    records = [RowStats.from_logits(*problem(factor)) for factor in (0.5, 2.0, 30.0)]
    masks = [torch.rand(BATCH, QUERIES) > 0.4 if padded else None for _ in records]
    by_head = [RowsByHead.of(rows, mask) for rows, mask in zip(records, masks, strict=True)]
    assert len({each.likeness for each in by_head}) == 1
    together = HeadStats.reduce(RowsByHead.stack(by_head)).split([each.heads for each in by_head])
    for rows, mask, found in zip(records, masks, together, strict=True):
        alone = HeadStats.from_rows(rows, mask)
        assert torch.equal(found.counts, alone.counts)
        assert torch.equal(found.extremes, alone.extremes)
        torch.testing.assert_close(found.sums, alone.sums, rtol=1e-14, atol=0.0)
        assert all(torch.equal(found.histograms[name], alone.histograms[name]) for name in alone.histograms)


@pytest.mark.parametrize("padded", [False, True])
def test_heads_are_sums_and_extremes_over_real_rows(padded: bool) -> None:
    logits, visible = problem(factor=6.0)
    rows = RowStats.from_logits(logits, visible)
    query_mask = torch.rand(BATCH, QUERIES) > 0.4 if padded else None
    found, expected = HeadStats.from_rows(rows, query_mask), by_hand(rows, query_mask)
    assert found.rows.tolist() == expected["rows"]
    for name, actual in {
        "max": found.max,
        "min": found.min,
        "centred": found.centred_max,
        "gain": found.mean_gain,
        "entropy": found.mean_normalized_entropy,
        "saturated": found.saturated_share,
    }.items():
        assert actual.tolist() == pytest.approx(expected[name]), name
    assert found.saturated_share.max() > 0.0, "the case must hold a saturated row"


def test_empty_and_padded_rows_are_counted_apart() -> None:
    logits, visible = problem()
    rows = RowStats.from_logits(logits, visible)
    query_mask = torch.ones(BATCH, QUERIES, dtype=torch.bool)
    everything = HeadStats.from_rows(rows, query_mask)
    empty = int((rows.count[:, 0] == 0).sum())
    assert empty >= 1
    assert everything.empty_rows[0] == empty
    query_mask[0, 2] = False
    assert HeadStats.from_rows(rows, query_mask).empty_rows[0] == empty - 1
    assert everything.softmax_rows[0] == int((rows.count[:, 0] > 1).sum())


def test_parts_merge_to_the_whole() -> None:
    logits, visible = problem()
    whole = HeadStats.from_rows(RowStats.from_logits(logits, visible))
    parts = [HeadStats.from_rows(RowStats.from_logits(logits[i : i + 1], visible[i : i + 1])) for i in range(BATCH)]
    merged = parts[2].merge(parts[0]).merge(parts[1])
    assert torch.equal(merged.counts, whole.counts)
    assert torch.equal(merged.extremes, whole.extremes)
    torch.testing.assert_close(merged.sums, whole.sums, rtol=1e-14, atol=0.0)
    for name in HISTOGRAM_EDGES:
        assert torch.equal(merged.histogram(name)[0], whole.histogram(name)[0])


def test_json_round_trip_is_exact() -> None:
    logits, visible = problem()
    visible[:, 4] = False  # a head without any row: infinities
    found = HeadStats.from_rows(RowStats.from_logits(logits, visible))
    back = HeadStats.from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False)))
    assert torch.equal(back.counts, found.counts)
    assert torch.equal(back.extremes, found.extremes)
    assert torch.equal(back.sums, found.sums)
    for name in HISTOGRAM_EDGES:
        assert torch.equal(back.histogram(name)[0], found.histogram(name)[0])


def test_from_dict_refuses_what_to_dict_did_not_write() -> None:
    data = HeadStats.from_rows(RowStats.from_logits(torch.zeros(2, 3, 5))).to_dict()
    broken = {**data, "heads": 3}
    with pytest.raises(ArgumentError, match="columns of differing length for 3 heads"):
        HeadStats.from_dict(broken)
    for place in (-1, 340):
        misplaced = {**data, "histograms": {**data["histograms"], "max": [[[place, 10]], []]}}
        with pytest.raises(ArgumentError, match=rf"IndexError\('bin {place} of 340'\)"):
            HeadStats.from_dict(misplaced)
    short = {**data, "histograms": {**data["histograms"], "peak": []}}
    with pytest.raises(ArgumentError, match="columns of differing length for 2 heads"):
        HeadStats.from_dict(short)
    del data["sums"]
    with pytest.raises(ArgumentError, match="KeyError\\('sums'\\)"):
        HeadStats.from_dict(data)


@pytest.mark.parametrize("name", ["max", "peak", "normalized_entropy", "centred_max"])
def test_quantiles_are_known_to_the_width_of_a_bin(name: str) -> None:
    rows = RowStats.from_logits(3.0 * torch.randn(1, 2, 5003, 13, dtype=torch.float64))
    values = {
        "max": rows.max,
        "peak": rows.peak(),
        "normalized_entropy": rows.normalized_entropy(),
        "centred_max": rows.centred_max(),
    }[name]
    found = HeadStats.from_rows(rows)
    for q in (0.0, 0.1, 0.5, 0.9, 1.0):
        exact = torch.quantile(values[0], q, dim=-1)
        width = 0.01 if name in ("peak", "normalized_entropy") else 0.1 * exact.abs() + 0.07
        assert ((found.quantile(name, q) - exact).abs() <= width).all(), q


def test_saturation_lies_on_an_edge_of_the_histogram() -> None:
    rows = RowStats.from_logits(4.0 * torch.randn(1, 1, 4001, 7, dtype=torch.float64))
    counts, edges = HeadStats.from_rows(rows).histogram("peak")
    assert counts[0, -1] == int((rows.peak() >= edges[-1]).sum())
    assert edges[-1] == 0.99


def test_a_row_with_nan_is_counted_and_hides_nothing() -> None:
    logits = torch.randn(1, 2, 5, 7)
    clean = HeadStats.from_rows(RowStats.from_logits(logits[:, :, 1:]))
    logits[0, 0, 0, 3] = math.nan
    logits[0, 1, 0, 3] = math.inf
    found = HeadStats.from_rows(RowStats.from_logits(logits))
    assert found.nonfinite_rows.tolist() == [1, 1]
    assert found.rows.tolist() == [5, 5]
    torch.testing.assert_close(found.mean_gain, clean.mean_gain)
    assert found.max[0] == clean.max[0]
    assert found.max[1] == math.inf
    assert found.histogram("max")[0].sum(-1).tolist() == [4, 4]


@pytest.mark.parametrize("sinks", [None, torch.zeros(2)], ids=["alone", "with a sink"])
def test_an_infinite_negative_logit_hides_nothing_either(sinks: Tensor | None) -> None:
    logits = torch.randn(1, 2, 5, 7)
    clean = HeadStats.from_rows(RowStats.from_logits(logits[:, :, 1:], sinks=sinks))
    logits[0, 0, 0, 3] = -math.inf
    logits[0, 1, 0] = -math.inf
    found = HeadStats.from_rows(RowStats.from_logits(logits, sinks=sinks))
    assert found.nonfinite_rows.tolist() == [1, 1]
    for name in ("mean_centred_max", "mean_entropy", "mean_peak", "mean_gain"):
        torch.testing.assert_close(getattr(found, name), getattr(clean, name))
    assert torch.isfinite(found.sums).all()


def test_no_head_at_all() -> None:
    found = HeadStats.from_rows(RowStats.empty((2, 0, 3)))
    assert found.heads == 0
    assert found.rows.shape == found.max.shape == (0,)
    assert HeadStats.from_dict(found.to_dict()).histogram("max")[0].shape == found.histogram("max")[0].shape


@pytest.mark.parametrize("shape", [(2, 3, 1, 5), (2, 1, 7, 5), (3, 7, 5)], ids=str)
def test_no_shape_makes_torch_warn(shape: tuple[int, ...]) -> None:
    torch.set_warn_always(True)  # torch warns once in a process, and another test may have been first
    try:
        assert HeadStats.from_rows(RowStats.from_logits(torch.zeros(shape))).heads == shape[-3]
    finally:
        torch.set_warn_always(False)


def test_no_row_at_all_gives_no_value() -> None:
    found = HeadStats.from_rows(RowStats.empty((2, 3, 0)))
    assert found.rows.tolist() == [0, 0, 0]
    assert found.max.tolist() == [-math.inf] * 3
    assert torch.isnan(found.mean_gain).all()
    assert torch.isnan(found.quantile("max", 0.5)).all()
    assert found.headroom(torch.float16).tolist() == [math.inf] * 3


def test_three_dimensional_rows_have_heads_first() -> None:
    found = HeadStats.from_rows(RowStats.from_logits(torch.zeros(3, 5, 7)))
    assert found.heads == 3
    assert found.rows.tolist() == [5, 5, 5]


def test_wrong_arguments_are_named() -> None:
    rows = RowStats.from_logits(torch.zeros(2, 3, 5, 7))
    with pytest.raises(
        ArgumentError, match=r"query_mask: got torch.bool of shape \(2, 3\); expected bool, broadcastable to \(2, 5\)"
    ):
        HeadStats.from_rows(rows, torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ArgumentError, match=r"query_mask: got torch\.float32"):
        HeadStats.from_rows(rows, torch.ones(2, 5))
    found = HeadStats.from_rows(rows)
    with pytest.raises(ArgumentError, match="name: got 'mean'; expected one of 'max'"):
        found.histogram("mean")
    with pytest.raises(ArgumentError, match=r"q: got 1\.5; expected a number in"):
        found.quantile("max", 1.5)
    with pytest.raises(ArgumentError, match="other: got 2 heads; expected 3 heads"):
        found.merge(HeadStats.from_rows(RowStats.from_logits(torch.zeros(1, 2, 5, 7))))
