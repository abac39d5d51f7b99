"""What the extras cost: softcap, sinks, a learned scale, masks and dropout, as shares of the plain kernel's speed."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import attemper
from benchmarks.attention_cpu.bars import Bars
from benchmarks.attention_cpu.cases import Shape, on_threads, tensors
from benchmarks.pairs import Pace, compare
from benchmarks.report import Report

HELD = ("softcap", "sinks", "learned scale")


def measure(report: Report, bars: Bars, shapes: tuple[Shape, ...], pace: Pace, threads: int) -> None:
    """One table, float32, statistics on; each share comes from rounds in which the plain kernel and all variants took turns."""
    table = report.table(
        f"Variants on {on_threads(threads)}: the plain kernel's time / the variant's",
        "B, H, Nq, Nk, D     ",
        "variant                ",
        "forward",
        "forward and backward",
    )
    for shape in shapes:
        arguments = variants(shape)
        forward = shares(forward_calls(shape, arguments), pace)
        trained = {name: arguments[name] for name in HELD}
        both = shares(training_calls(shape, trained), pace._replace(fewest=min(3, pace.fewest)))
        for name in arguments:
            table.add(str(shape), name, f"{forward[name]:.0%}", f"{both[name]:.0%}" if name in both else "–")
        for name in HELD:
            report.at_least(f"({shape}) {name}, {on_threads(threads)}: share of speed, forward", forward[name], bars.kept)
            report.at_least(f"({shape}) {name}, {on_threads(threads)}: share of speed, with backward", both[name], bars.kept)


def variants(shape: Shape) -> dict[str, dict[str, Any]]:
    """The arguments of each, beside query, key and value."""
    heads, pair = shape.heads, (shape.queries, shape.keys)
    generator = torch.Generator().manual_seed(1)
    return {
        "softcap": {"softcap": 30.0},
        "sinks": {"sinks": torch.zeros(heads).requires_grad_()},
        "learned scale": {"scale": torch.full((heads,), shape.width**-0.5).requires_grad_()},
        "bool mask, 90 % visible": {"attn_mask": torch.rand(pair, generator=generator) < 0.9},
        "causal, as a bool mask": {"attn_mask": torch.ones(pair, dtype=torch.bool).tril()},
        "float mask": {"attn_mask": torch.randn(pair, generator=generator)},
        "dropout 0.1": {"dropout_p": 0.1},
    }


Calls = Mapping[str, Callable[[], object]]


def shares(calls: Calls, pace: Pace) -> dict[str, float]:
    """Time of the first call over each other's."""
    timed = compare(tuple(calls.values()), pace)
    return {name: timed.ratio(0, which) for which, name in enumerate(calls) if which}


def forward_calls(shape: Shape, arguments: Mapping[str, dict[str, Any]]) -> Calls:
    """The plain kernel first."""
    query, key, value = tensors(shape, torch.float32)

    def call(more: dict[str, Any]) -> Callable[[], object]:
        def run() -> None:
            with torch.no_grad():
                attemper.attention(query, key, value, return_stats=True, impl="cpu", **more)

        return run

    return {name: call(more) for name, more in ({"plain": {}} | dict(arguments)).items()}


def training_calls(shape: Shape, arguments: Mapping[str, dict[str, Any]]) -> Calls:
    """The same with the gradients of query, key and value, and of the variant's own tensor where it has one."""
    leaves = tensors(shape, torch.float32, gradients=True)
    upstream = torch.randn(shape.batch, shape.heads, shape.queries, shape.width)

    def call(more: dict[str, Any]) -> Callable[[], object]:
        own = [tensor for tensor in more.values() if isinstance(tensor, Tensor) and tensor.requires_grad]

        def run() -> None:
            output, _ = attemper.attention(*leaves, return_stats=True, impl="cpu", **more)
            torch.autograd.grad(output, (*leaves, *own), upstream)

        return run

    return {name: call(more) for name, more in ({"plain": {}} | dict(arguments)).items()}
