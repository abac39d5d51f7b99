"""Attention on the CPU: PyTorch's fused one, ours without statistics, ours with all of them, in one process and in turn.

    python -m benchmarks.attention_cpu [--write]

Speeds and shares of the machine's peak, the price of the extras, other ways to attend, a tiny call, memory and errors; then the
bars. Exit 1 if one is missed, with a list of those. `--write` puts the tables into docs/performance.md.
"""

import argparse
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import peak
from benchmarks.attention_cpu import errors, peers, scratch, speed, tiny, variants
from benchmarks.attention_cpu.bars import SMOKE, Bars, bars_for, explain
from benchmarks.attention_cpu.cases import DTYPES, PEER_SHAPES, QUICK_SHAPES, SHAPES, VARIANT_SHAPES, Shape
from benchmarks.machine import Machine, here
from benchmarks.pairs import Pace
from benchmarks.report import Report, around_markers

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "performance.md"
MARKER = "benchmarks.attention_cpu"
SECTIONS = ("speed", "variants", "tiny", "peers", "memory", "errors")


class Effort(NamedTuple):
    """How much work a run is: everything, or as little as shows that every part of it runs."""

    shapes: tuple[Shape, ...]
    variant_shapes: tuple[str, ...]
    peer_shapes: tuple[str, ...]
    pace: Pace
    peak_seconds: float
    memory_length: int
    memory_cases: tuple[scratch.Case, ...]
    flex: bool


WHOLE = Effort(SHAPES, VARIANT_SHAPES, PEER_SHAPES, Pace(), peak.SECONDS, 16384, scratch.CASES, flex=True)
QUICK = Effort(QUICK_SHAPES, ("257x64",), ("257x64",), Pace(0.002, 2, 2, 0.1), 0.005, 256, scratch.CASES[:1], flex=False)


def main(arguments: list[str] | None = None, bars: Bars | None = None) -> int:
    """Measure, print, and write where asked to; 1 if a bar is missed, else 0. Without `bars`, those of this machine."""
    began = time.perf_counter()
    options = parse(arguments)
    machine = here()
    if bars is None:
        bars = SMOKE if options.quick else bars_for(machine)
    if options.write is not None:
        around_markers(options.write, MARKER)  # now, not when all is measured
    report = measure(options, machine, bars)
    if options.write is not None:
        before, after = around_markers(options.write, MARKER)
        options.write.write_text(f"{before}\n{document(report, machine, bars, options)}\n{after}", "utf-8")
    took = f"{time.perf_counter() - began:.0f} s"
    for check in report.missed:
        print(f"missed: {check}")
    print(f"{len(report.checks) - len(report.missed)} of {len(report.checks)} bars held, {len(report.missed)} missed, in {took}")
    return 1 if report.missed else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    names = [shape.name for shape in (*SHAPES, *QUICK_SHAPES)]
    parser = argparse.ArgumentParser("python -m benchmarks.attention_cpu", description="Attention on the CPU beside PyTorch's.")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], metavar="N", help="numbers of threads (default: 1 2)")
    parser.add_argument("--shapes", nargs="+", choices=names, metavar="NAME", help=f"some shapes only: {', '.join(names)}")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, metavar="DTYPE", help=f"some dtypes only: {', '.join(DTYPES)}")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, metavar="NAME", help=f"some parts only: {', '.join(SECTIONS)}")
    parser.add_argument("--quick", action="store_true", help="small shapes, no speed judged: to see that everything runs")
    parser.add_argument(
        "--write", type=Path, nargs="?", const=DOCUMENT, metavar="FILE", help="put the tables into docs/performance.md, or FILE"
    )
    options = parser.parse_args(arguments)
    if min(options.threads) < 1:
        parser.error(f"argument --threads: got {min(options.threads)}; expected numbers from 1")
    if options.write is not None and not options.write.is_file():
        parser.error(f"argument --write: {options.write} is not a file; expected a document with the markers of {MARKER}")
    if options.write == DOCUMENT and (options.quick or options.shapes or options.dtypes or options.sections):
        parser.error("--write without FILE wants the whole run: no --quick, --shapes, --dtypes or --sections")
    for section, measured in shapes_of(options).items():
        if not measured and section in (options.sections or ("speed",)):
            known = ", ".join(shape.name for shape in shapes_of(options, every=True)[section])
            parser.error(f"argument --shapes: got {' '.join(options.shapes)}, of which {section} measures none; it has {known}")
    return options


def effort_of(options: argparse.Namespace) -> Effort:
    """How much to do."""
    return QUICK if options.quick else WHOLE


def shapes_of(options: argparse.Namespace, *, every: bool = False) -> dict[str, tuple[Shape, ...]]:
    """The shapes that a section measures, of those asked for or of all; sections with cases of their own are left out."""
    effort = effort_of(options)
    shapes = tuple(shape for shape in effort.shapes if every or not options.shapes or shape.name in options.shapes)
    return {
        "speed": shapes,
        "errors": shapes,
        "variants": named(shapes, effort.variant_shapes),
        "peers": named(shapes, effort.peer_shapes),
    }


def measure(options: argparse.Namespace, machine: Machine, bars: Bars) -> Report:
    """Every section asked for."""
    effort, shapes = effort_of(options), shapes_of(options)
    selection = speed.Selection(shapes["speed"], tuple(options.dtypes or DTYPES), effort.pace)
    sections = options.sections or SECTIONS
    threads = tuple(options.threads)
    print(machine)
    report = Report()
    peaks = measure_peaks(report, machine, threads, effort.peak_seconds) if "speed" in sections else {}
    for count in threads:
        torch.set_num_threads(count)
        if "speed" in sections:
            speed.measure(report, bars, selection, count, peaks.get(count))
        if "variants" in sections:
            variants.measure(report, bars, shapes["variants"], effort.pace, count)
        if "tiny" in sections:
            tiny.measure(report, bars, effort.pace, count)
    torch.set_num_threads(threads[0])
    if "peers" in sections:
        peers.measure(report, shapes["peers"], effort.pace, threads[0], flex=effort.flex)
    if "memory" in sections:
        scratch.measure(report, bars, threads, effort.memory_length, effort.memory_cases)
    if "errors" in sections:
        errors.measure(report, bars, shapes["errors"], selection.dtypes)
    return report


def named(shapes: tuple[Shape, ...], names: tuple[str, ...]) -> tuple[Shape, ...]:
    """Those of that name."""
    return tuple(shape for shape in shapes if shape.name in names)


def measure_peaks(report: Report, machine: Machine, threads: tuple[int, ...], seconds: float) -> dict[int, peak.Peak]:
    """The machine's ceilings, by number of threads, and a table of them; nothing but a note where none can be measured."""
    with peak.Programs(machine) as programs:
        if programs.failure:
            report.note(f"The machine's peak was not measured, and shares of it are left out: {programs.failure}.")
            return {}
        found = {count: programs.measure(count, seconds) for count in threads}
    table = report.table(
        "Peak of the machine, 10⁹ operations a second", "threads", "arithmetic                          ", "peak"
    )
    for count, ceiling in found.items():
        for bits, rate in ceiling.float32.items():
            table.add(str(count), f"float32 multiply-add, {bits}-bit vectors", f"{rate / 1e9:.0f}")
        if ceiling.bfloat16 is not None:
            table.add(str(count), "bfloat16 dot product", f"{ceiling.bfloat16 / 1e9:.0f}")
    return found


def document(report: Report, machine: Machine, bars: Bars, options: argparse.Namespace) -> str:
    """What goes between the markers."""
    command = ["python -m benchmarks.attention_cpu --threads", *map(str, options.threads)]
    for name in ("shapes", "dtypes", "sections"):
        if chosen := getattr(options, name):
            command += [f"--{name}", *chosen]
    if options.quick:
        command.append("--quick")
    return f"`{' '.join(command)}`, {datetime.now(UTC).date()}, on: {machine}.\n\n{explain(bars)}\n\n{report.markdown()}"


if __name__ == "__main__":
    sys.exit(main())
