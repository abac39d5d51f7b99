"""Other ways to attend, at a shape or two: FlexAttention, and eager code that keeps every logit for the same statistics."""

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import attemper
from benchmarks.attention_cpu.cases import Shape, on_threads, tensors
from benchmarks.attention_cpu.speed import milliseconds
from benchmarks.pairs import Pace, compare
from benchmarks.report import Report


def measure(report: Report, shapes: tuple[Shape, ...], pace: Pace, threads: int, *, flex: bool) -> None:
    """One table, float32, full, forward without gradient; `flex`: with FlexAttention, which takes seconds to compile."""
    table = report.table(
        f"Peers on {on_threads(threads)}, forward",
        "B, H, Nq, Nk, D     ",
        "what                                   ",
        "ms    ",
        "its time / ours with statistics",
    )
    for shape in shapes:
        query, key, value = tensors(shape, torch.float32)
        calls: dict[str, Callable[[], object]] = {
            "ours, with statistics": lambda q=query, k=key, v=value: attemper.attention(q, k, v, return_stats=True, impl="cpu"),
            "SDPA, without": lambda q=query, k=key, v=value: F.scaled_dot_product_attention(q, k, v),
            "eager, every logit kept, with statistics": lambda q=query, k=key, v=value: attemper.attention(
                q, k, v, return_stats=True, impl="reference"
            ),
        }
        if flex:
            try:
                calls["FlexAttention, compiled, without"] = compiled_flex_attention(query, key, value)
            except (ImportError, OSError, RuntimeError) as error:
                report.note(f"FlexAttention could not be compiled here: {type(error).__name__}.")
        with torch.no_grad():
            timed = compare(tuple(calls.values()), pace._replace(fewest=2, seconds=0.0))  # one of them takes seconds a call
        for which, name in enumerate(calls):
            table.add(str(shape), name, milliseconds(timed.seconds(which)), f"{timed.ratio(which, 0):.2f}")
    if not flex:
        report.note("FlexAttention was left out: a smoke run does not compile it.")


def compiled_flex_attention(query: Tensor, key: Tensor, value: Tensor) -> Callable[[], object]:
    """A call of it, compiled for these tensors."""
    from torch.nn.attention.flex_attention import flex_attention

    # What is compiled for one number of threads or one shape must not stand in for another.
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        compiled(query, key, value)
    return lambda: compiled(query, key, value)
