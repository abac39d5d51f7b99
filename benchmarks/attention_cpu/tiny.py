"""What a call costs where there is next to nothing to compute."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import attemper
from benchmarks.attention_cpu.bars import Bars
from benchmarks.attention_cpu.cases import TINY, on_threads, tensors
from benchmarks.pairs import Pace, compare
from benchmarks.report import Report


def measure(report: Report, bars: Bars, pace: Pace, threads: int) -> None:
    """One table; the bar is on the plain call, the rest is reported."""
    table = report.table(
        f"A tiny call, ({TINY}) float32, on {on_threads(threads)}",
        "call                              ",
        "SDPA, µs",
        "ours, µs",
        "ours / SDPA",
    )
    leaves = tensors(TINY, torch.float32, gradients=True)
    query, key, value = (leaf.detach() for leaf in leaves)
    upstream = torch.ones_like(query)

    def theirs() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value)

    def theirs_trained() -> object:
        return torch.autograd.grad(F.scaled_dot_product_attention(*leaves), leaves, upstream)

    def ours() -> Tensor:
        return attemper.attention(query, key, value)

    def ours_with() -> object:
        return attemper.attention(query, key, value, return_stats=True)

    def ours_trained() -> object:
        return torch.autograd.grad(attemper.attention(*leaves), leaves, upstream)

    def ours_trained_with() -> object:
        return torch.autograd.grad(attemper.attention(*leaves, return_stats=True)[0], leaves, upstream)

    def add(name: str, peer: Callable[[], object], own: Callable[[], object]) -> float:
        timed = compare((peer, own), pace)
        table.add(name, f"{1e6 * timed.seconds(0):.1f}", f"{1e6 * timed.seconds(1):.1f}", f"{timed.ratio(1, 0):.2f}")
        return timed.ratio(1, 0)

    with torch.no_grad():
        plain = add("forward", theirs, ours)
        add("forward, with statistics", theirs, ours_with)
    add("with gradients", theirs_trained, ours_trained)
    add("with gradients and statistics", theirs_trained, ours_trained_with)
    report.at_most(f"tiny call, {on_threads(threads)}: ours / SDPA", plain, bars.tiny)
