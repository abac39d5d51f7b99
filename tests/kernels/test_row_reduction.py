"""Rows reduced to heads by the extension: to the bit what `HeadStats.reduce` gives, but for the rounding of sums."""

import math
import multiprocessing as mp
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attemper.kernels import cpu, row_reduction
from attemper.monitor.measuring import Taken, measure
from attemper.stats import HeadStats, RowsByHead, RowStats

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the extension is not here")


def record(trial: int, dtype: torch.dtype, shape: tuple[int, int, int, int]) -> RowsByHead:
    """Rows of logits of many sizes: some with NaN and infinities, some empty, some padded, some with a sink."""
    generator = torch.Generator().manual_seed(trial)
    z = torch.randn(*shape, dtype=dtype, generator=generator) * 10.0 ** (trial % 5 - 1)
    odd = torch.rand(shape, generator=generator)
    if trial % 3 == 0:
        z = torch.where(odd < 0.01, math.nan, torch.where(odd < 0.02, math.inf, torch.where(odd < 0.03, -math.inf, z)))
    visible = torch.rand(shape, generator=generator) < (1.0, 0.5, 0.03)[trial % 3]
    sinks = torch.randn(shape[1], dtype=dtype, generator=generator) if trial % 4 == 0 else None
    mask = torch.rand(shape[0], shape[2], generator=generator) < 0.7 if trial % 2 else None
    return RowsByHead.of(RowStats.from_logits(z, visible, -3 * z, sinks), mask)


def products(rows: RowsByHead) -> Tensor:
    each = rows.rows.product_absmax()
    return (each if rows.real is None else torch.where(rows.real, each, -math.inf)).amax(-1).double()


def compare(rows: RowsByHead) -> None:
    expected, found = HeadStats.reduce(rows), row_reduction.reduced(rows)
    assert found is not None
    stats, largest = found
    assert torch.equal(stats.counts, expected.counts)
    assert torch.equal(stats.extremes, expected.extremes)
    for name, histogram in expected.histograms.items():
        # Two exponentials may lie on the two sides of an edge.
        moved = (stats.histograms[name] - histogram).abs().sum()
        assert moved <= (2 if name == "peak" else 0), name
    rounding = 1e-6 if rows.rows.lse.dtype == torch.float32 else 1e-13
    torch.testing.assert_close(stats.sums, expected.sums, rtol=rounding, atol=10 * rounding, equal_nan=True)
    torch.testing.assert_close(largest, products(rows), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("trial", range(24))
def test_it_is_what_the_definition_gives(trial: int, dtype: torch.dtype) -> None:
    compare(record(trial, dtype, (1 + trial % 3, 1 + trial % 5, 3 + trial, 1 + 2 * trial)))


@pytest.mark.parametrize("threads", [1, 3])
def test_many_rows_on_several_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        compare(record(5, torch.float32, (2, 4, 1500, 7)))
    finally:
        torch.set_num_threads(before)


def test_rows_that_lie_apart() -> None:
    rows, real = record(1, torch.float32, (1, 3, 40, 9))
    apart = RowStats(rows.lse.mT.contiguous().mT, rows.entropy, rows.rest.transpose(0, 2).contiguous().transpose(0, 2))
    compare(RowsByHead(apart, real))


@pytest.mark.parametrize("shape", [(0, 3, 5, 4), (1, 3, 0, 4)])
def test_no_rows(shape: tuple[int, int, int, int]) -> None:
    found = row_reduction.reduced(record(1, torch.float32, shape))
    assert found is not None
    assert found[0].counts.tolist() == [[0] * 3] * 5
    assert found[1].tolist() == [-math.inf] * 3
    assert found[0].max.tolist() == [-math.inf] * 3


def test_what_it_does_not_take_is_left_to_torch() -> None:
    rows, real = record(1, torch.float32, (1, 3, 5, 4))
    halves = RowStats(rows.lse.half(), rows.entropy.half(), rows.rest.half())
    assert row_reduction.reduced(RowsByHead(halves, real)) is None
    mixed = RowStats(rows.lse.double(), rows.entropy, rows.rest)
    assert row_reduction.reduced(RowsByHead(mixed, real)) is None
    away = RowStats(rows.lse.to("meta"), rows.entropy.to("meta"), rows.rest.to("meta"))
    assert row_reduction.reduced(RowsByHead(away, None)) is None
    # Read as memory of [heads, rows], they would be read beyond their end.
    for part in (RowStats(rows.lse, rows.entropy[:, :1], rows.rest), RowStats(rows.lse, rows.entropy, rows.rest[..., :1])):
        assert row_reduction.reduced(RowsByHead(part, real)) is None


class Wrapped(Tensor):
    """A mask of a kind of its own, whose memory is its own matter."""


@pytest.mark.parametrize(
    "change", [lambda mask: mask.byte() * 2, lambda mask: mask.to("meta"), lambda mask: mask.as_subclass(Wrapped)]
)
def test_a_mask_that_it_does_not_take_is_left_to_torch(change: Callable[[Tensor], Tensor]) -> None:
    rows, real = record(1, torch.float32, (1, 3, 5, 4))
    assert real is not None
    assert row_reduction.reduced(RowsByHead(rows, change(real))) is None


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_under_a_transform_new_tensors_have_no_memory(transform: Callable[..., Any]) -> None:
    rows = record(1, torch.float32, (1, 3, 5, 4))
    found: list[Any] = []

    def function(number: Tensor) -> Tensor:
        found.append(row_reduction.reduced(rows))
        found.append(measure([Taken(rows, 1.0, None)])[0].stats.counts)
        return number.sum()

    transform(function)(torch.ones(2))
    assert found[0] is None
    assert torch.equal(found[1].cpu(), HeadStats.reduce(rows).counts)


def test_in_a_forked_child() -> None:
    """Whose pool of threads did not survive the fork."""
    rows = record(5, torch.float32, (2, 4, 1500, 7))
    compare(rows)
    child = mp.get_context("fork").Process(target=compare, args=(rows,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
