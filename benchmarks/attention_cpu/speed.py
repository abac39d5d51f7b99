"""The main table: PyTorch's fused attention, ours, ours with all statistics, forward and backward."""

import timeit
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import attemper
from benchmarks.attention_cpu.bars import Bars
from benchmarks.attention_cpu.cases import DTYPES, Setting, Shape, mask_name, masks, on_threads, tensors
from benchmarks.pairs import Pace, Timed, compare
from benchmarks.peak import Peak
from benchmarks.report import Report

PEER, OURS, WITH = 0, 1, 2  # the functions of a round; in the backward pass ours is the one with statistics
SLOWEST_BACKWARD = 1.5  # seconds a call of PyTorch's
SHORTER = 512  # queries and keys where PyTorch's would take longer than that


class Selection(NamedTuple):
    """What of it all a run measures."""

    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    pace: Pace


def measure(report: Report, bars: Bars, selection: Selection, threads: int, peak: Peak | None) -> None:
    """One table, for the number of threads that torch is set to."""
    table = report.table(
        f"Speed on {on_threads(threads)}",
        "B, H, Nq, Nk, D     ",
        "dtype   ",
        "mask  ",
        "SDPA, ms",
        "ours, ms",
        "with statistics, ms",
        "SDPA / ours with statistics",
        "cost of statistics",
        "share of peak",
        "backward: SDPA, ms",
        "backward: ours, ms",
        "backward: SDPA / ours",
    )
    for shape in selection.shapes:
        for dtype in selection.dtypes:
            for causal in masks(shape):
                setting = Setting(shape, dtype, causal, threads)
                timed = forward(setting, selection.pace)
                share = shape.operations(causal=causal) / timed.seconds(WITH) / peak.of(dtype) if peak is not None else None
                trained = backward(setting, selection.pace) if shape.width >= 64 else None
                table.add(
                    str(shape),
                    dtype,
                    mask_name(causal),
                    *(milliseconds(timed.seconds(which)) for which in (PEER, OURS, WITH)),
                    f"{timed.ratio(PEER, WITH):.2f}",
                    f"{timed.ratio(WITH, OURS) - 1:.1%}",
                    "–" if share is None or shape.is_decode else f"{share:.0%}",
                    *backward_cells(shape, trained),
                )
                hold(report, bars, setting, timed, share, None if trained is None else trained[1])


def backward_cells(shape: Shape, trained: tuple[Shape, Timed] | None) -> tuple[str, str, str]:
    """The last three cells of a line; narrow heads are there for the cost of their statistics alone."""
    if trained is None:
        return "–", "–", "–"
    measured, back = trained
    at = "" if measured == shape else f" (N = {measured.queries})"
    return milliseconds(back.seconds(PEER)), milliseconds(back.seconds(OURS)), f"{back.ratio(PEER, OURS):.2f}{at}"


def hold(report: Report, bars: Bars, setting: Setting, timed: Timed, share: float | None, back: Timed | None) -> None:
    """The bars of one line."""
    shape, causal = setting.shape, setting.causal
    report.at_most(f"{setting}: cost of statistics", timed.ratio(WITH, OURS) - 1, bars.cost_of(shape))
    if bars.parity:
        report.at_least(f"{setting}: SDPA / ours without statistics", timed.ratio(PEER, OURS), bars.parity)
    speed = bars.speed_of(setting)
    if speed is None:
        return
    report.at_least(f"{setting}: SDPA / ours, forward", timed.ratio(PEER, WITH), speed.forward(shape, causal=causal))
    if back is not None and not shape.is_decode:
        report.at_least(f"{setting}: SDPA / ours, backward", back.ratio(PEER, OURS), speed.backward)
    if shape.is_long and not causal and share is not None:
        report.at_least(f"{setting}: share of peak", share, speed.share)


def forward(setting: Setting, pace: Pace) -> Timed:
    """PEER, OURS and WITH, without gradient."""
    query, key, value = tensors(setting.shape, DTYPES[setting.dtype])
    causal = setting.causal
    with torch.no_grad():
        return compare(
            (
                lambda: F.scaled_dot_product_attention(query, key, value, is_causal=causal),
                lambda: attemper.attention(query, key, value, is_causal=causal, impl="cpu"),
                lambda: attemper.attention(query, key, value, is_causal=causal, return_stats=True, impl="cpu"),
            ),
            pace,
        )


def backward(setting: Setting, pace: Pace) -> tuple[Shape, Timed]:
    """PEER and OURS, the gradients of query, key and value alone, and the shape they were measured at.

    PyTorch's float16 backward takes up to minutes at the long shapes, and on some processors its bfloat16 one takes seconds.
    Where it would be slow, which a shorter shape tells, both are measured at that one.
    """
    shape, pace = setting.shape, pace._replace(fewest=min(3, pace.fewest))
    shorter = shape.at_most(SHORTER)
    if shorter != shape:
        theirs, _ = backward_calls(shorter, setting)
        theirs()
        growth = shape.operations(causal=False) / shorter.operations(causal=False)
        if timeit.timeit(theirs, number=1) * growth > SLOWEST_BACKWARD:
            shape = shorter
    return shape, compare(backward_calls(shape, setting), pace)


def backward_calls(shape: Shape, setting: Setting) -> tuple[Callable[[], object], Callable[[], object]]:
    """PEER and OURS at a shape."""
    leaves = tensors(shape, DTYPES[setting.dtype], gradients=True)
    theirs = F.scaled_dot_product_attention(*leaves, is_causal=setting.causal)
    ours, _ = attemper.attention(*leaves, is_causal=setting.causal, return_stats=True, impl="cpu")
    upstream = torch.randn(ours.shape).to(ours.dtype)

    def gradients(output: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(output, leaves, upstream, retain_graph=True)

    return lambda: gradients(theirs), lambda: gradients(ours)


def milliseconds(seconds: float) -> str:
    """A time as the tables write it."""
    return f"{1e3 * seconds:.3g}" if seconds < 0.1 else f"{1e3 * seconds:.0f}"
