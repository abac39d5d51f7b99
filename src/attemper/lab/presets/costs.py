"""Time and memory of one attention layer, forwards and backwards, additive or by the dot product, written out or in tiles."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from attemper.memory import PeakMemory, give_back
from attemper.nn import AdditiveAttention
from attemper.ops import attention

BATCH = 2
MOST = 2 * 2**30  # bytes that a measurement may hold
COPIES = 4  # of [n, n, d] that additive attention holds at once, written out


class Cost(NamedTuple):
    """One kind of attention at one size.

    Attributes:
        attention: which, in words. n: queries, and keys. d: width, of the head or of the hidden layer.
        milliseconds: median; NaN where it would hold too much. mib: how far the resident size of the process rose, at most;
            NaN where it would hold too much or the system does not tell.
    """

    attention: str
    n: int
    d: int
    milliseconds: float
    mib: float


def costs(lengths: Sequence[int], widths: Sequence[int], rounds: int) -> list[Cost]:
    """Every kind at every length and width; in each round the kinds take turns.

    Args:
        lengths: n. widths: d. rounds: timed, after one that is not.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [cost for d in widths for n in lengths for cost in _at(n, d, rounds)]
    finally:
        torch.set_num_threads(threads)


def _at(n: int, d: int, rounds: int) -> list[Cost]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, n, d, generator=generator)
    works = _works(n, d, x)
    memory = {name: _risen(work) for name, work in works.items()}
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            began = time.perf_counter()
            work()
            taken[name].append(1e3 * (time.perf_counter() - began))
    names = ("dot, written out", "dot, attemper.attention", "additive, written out", "additive, in tiles")
    return [Cost(name, n, d, median(taken[name]) if name in works else math.nan, memory.get(name, math.nan)) for name in names]


def _works(n: int, d: int, x: Tensor) -> dict[str, Callable[[], None]]:
    projections = nn.Linear(d, 2 * d, bias=False)

    def products(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], None]:
        def work() -> None:
            q, k = projections(x)[:, None].chunk(2, -1)
            attend(q, k, x[:, None]).sum().backward()

        return work

    def additive(impl: str) -> Callable[[], None]:
        layer = AdditiveAttention(d, impl=impl)

        def work() -> None:
            mixed = layer(x, x, x)
            assert isinstance(mixed, Tensor)
            mixed.sum().backward()

        return work

    found = {"dot, written out": products(_written_out), "dot, attemper.attention": products(attention)}
    found["additive, in tiles"] = additive("blocked")
    if 4 * COPIES * BATCH * n * n * d <= MOST:
        found["additive, written out"] = additive("plain")
    return found


def _written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1) @ v


def _risen(work: Callable[[], None]) -> float:
    work()  # what a first call sets up is not counted
    give_back()
    with PeakMemory() as before:
        pass
    with PeakMemory() as during:
        work()
    # Of peaks since the process began the second is no higher, however much the work took.
    return during.mib - before.mib if before.within and during.within else math.nan
