"""Memory beyond inputs and outputs, each figure from a process of its own; `benchmarks.memory` measures it."""

from benchmarks.attention_cpu.bars import Bars
from benchmarks.attention_cpu.cases import on_threads
from benchmarks.memory import Job, measured
from benchmarks.report import Report

WIDTH = 128
Case = tuple[int, str]  # heads and dtype
CASES: tuple[Case, ...] = ((1, "float32"), (2, "float32"), (2, "bfloat16"))


def measure(report: Report, bars: Bars, threads: tuple[int, ...], length: int, cases: tuple[Case, ...] = CASES) -> None:
    """One table; statistics on. What the forward pass keeps for the backward pass counts with the forward pass."""
    table = report.table(
        f"Memory beyond inputs and outputs, N = {length}, width {WIDTH}, full, MiB",
        "threads",
        "heads",
        "dtype   ",
        "forward",
        "backward",
        "backward, a thread",
    )
    for count in threads:
        for heads, dtype in cases:
            found = measured(Job("cpu", heads, length, WIDTH, dtype, causal=0, threads=count))
            forward, backward = found.scratch, max(0.0, found.scratch_of_both - found.scratch)
            table.add(str(count), str(heads), dtype, f"{forward:.1f}", f"{backward:.1f}", f"{backward / count:.1f}")
            case = f"memory, heads {heads}, {dtype}, {on_threads(count)}, MiB"
            report.at_most(f"{case}: forward", forward, bars.forward_mib)
            report.at_most(f"{case}: backward, a thread", backward / count, bars.backward_mib)
