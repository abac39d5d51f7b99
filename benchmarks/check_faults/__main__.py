"""Plant faults into tiny models and count how many `attemper check` finds; check the same models whole and count false alarms.

    python -m benchmarks.check_faults [--write]

Exit 1 if fewer than 12 kinds of fault are found in every architecture in which they can be planted, 10 or more; if fewer than 40
sound architectures were checked, or one of them has a finding of severity error; or if something is missed that is not listed as
known. `--write` puts the tables into docs/check_faults.md; `--quick` takes three architectures and shows that all of it runs.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

from benchmarks.check_faults.kinds import KINDS, Kind
from benchmarks.check_faults.models import NAMES
from benchmarks.check_faults.running import Outcome, Sound, plant, sound
from benchmarks.report import Report, around_markers

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "check_faults.md"
MARKER = "benchmarks.check_faults"
FEW = ("llama", "bert", "gemma3")


class Bars(NamedTuple):
    """What has to be held: so many kinds found in so many architectures each, and so many sound architectures without error."""

    kinds: int
    architectures: int
    sound: int


WHOLE, QUICK = Bars(12, 10, 40), Bars(12, 1, len(FEW))


def main(arguments: list[str] | None = None, bars: Bars | None = None, kinds: Sequence[Kind] = KINDS) -> int:
    """Run, print, and write where asked to; 1 if a bar is missed, else 0."""
    began = time.perf_counter()
    options = _parse(arguments)
    bars = bars or (QUICK if options.quick else WHOLE)
    if options.write is not None:
        around_markers(options.write, MARKER)  # now, not when all is run
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    names = options.architectures or (FEW if options.quick else NAMES)
    report = Report()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own
        outcomes = _faults(report, kinds, names, bars)
        runs = _sound(report, names)
    _hold(report, outcomes, runs, bars)
    if options.write is not None:
        before, after = around_markers(options.write, MARKER)
        options.write.write_text(f"{before}\n{_headline(options)}\n\n{report.markdown()}\n{after}", "utf-8")
    for check in report.missed:
        print(f"missed: {check}")
    held = len(report.checks) - len(report.missed)
    seconds = time.perf_counter() - began
    print(f"{held} of {len(report.checks)} bars held, {len(report.missed)} missed, in {seconds:.0f} s")
    return int(bool(report.missed))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.check_faults", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few architectures, with bars to fit")
    parser.add_argument("--architectures", nargs="+", choices=NAMES, metavar="NAME", help="these alone")
    parser.add_argument("--write", nargs="?", type=Path, const=DOCUMENT, metavar="FILE", help="the tables, between its markers")
    options = parser.parse_args(arguments)
    if options.write == DOCUMENT and (options.quick or options.architectures):
        parser.error("--write without FILE wants the whole run")
    return options


def _faults(report: Report, kinds: Sequence[Kind], names: Sequence[str], bars: Bars) -> list[Outcome]:
    width = max((len(kind.name) for kind in kinds), default=0)
    table = report.table("Faults", "kind of fault".ljust(width), "code            ", "found / tried", "sensitivity")
    outcomes = []
    for kind in kinds:
        outcome = plant(kind, names)
        outcomes.append(outcome)
        share = f"{len(outcome.found) / outcome.tried:.1%}" if outcome.tried else "–"
        table.add(kind.name, " or ".join(kind.codes), f"{len(outcome.found)} / {outcome.tried}", share)
    found, tried = sum(len(each.found) for each in outcomes), sum(each.tried for each in outcomes)
    table.add("all", "", f"{found} / {tried}", f"{found / tried:.1%}" if tried else "–")
    report.note(
        f"{len(_whole(outcomes, bars))} of {len(kinds)} kinds found wherever they were planted, in {bars.architectures} "
        "architectures or more."
    )
    _misses(report, outcomes)
    return outcomes


def _misses(report: Report, outcomes: Sequence[Outcome]) -> None:
    reasons: dict[tuple[str, str], list[str]] = {}
    for outcome in outcomes:
        for name in outcome.missed:
            reasons.setdefault((outcome.kind.name, outcome.why(name) or "**not known why**"), []).append(name)
    lines = [f"- {kind}: {', '.join(names)}. Why: {reason}." for (kind, reason), names in reasons.items()]
    if lines:
        report.note("### Not found\n\n" + "\n".join(lines))
    struck = [f"{outcome.kind.name} in {', '.join(outcome.struck)}" for outcome in outcomes if outcome.struck]
    if struck:
        report.note(f"Found although listed as not found; strike them from the list: {'; '.join(struck)}.")


def _sound(report: Report, names: Sequence[str]) -> list[Sound]:
    runs = [run for name in names for run in sound(name)]
    table = report.table("Sound models", "dtype    ", "padding", "models", "with errors", "with warnings")
    for dtype, padding in dict.fromkeys((run.dtype, run.padding) for run in runs):
        chosen = [run for run in runs if (run.dtype, run.padding) == (dtype, padding)]
        counts = (len(chosen), sum(bool(run.errors) for run in chosen), sum(bool(run.warnings) for run in chosen))
        table.add(dtype, padding, *map(str, counts))
    said = [f"- {run.name}, {run.dtype}, padding {run.padding}: {each}" for run in runs for each in run.errors]
    if said:
        report.note("### False alarms\n\n" + "\n".join(said))
    warned = dict.fromkeys((run.name, each.partition(" ")[0]) for run in runs for each in run.warnings)
    if warned:
        report.note(f"Warnings: {', '.join(f'{code} in {name}' for name, code in warned)}.")
    return runs


def _hold(report: Report, outcomes: Sequence[Outcome], runs: Sequence[Sound], bars: Bars) -> None:
    report.at_least(
        f"kinds of fault found wherever they were planted, in {bars.architectures} architectures or more",
        len(_whole(outcomes, bars)),
        bars.kinds,
    )
    unknown = [f"{outcome.kind.name} in {', '.join(outcome.unknown)}" for outcome in outcomes if outcome.unknown]
    report.at_most("misses that are not listed as known" + "".join(f"; {each}" for each in unknown), len(unknown), 0)
    report.at_least("sound architectures checked", len({run.name for run in runs}), bars.sound)
    report.at_most("sound models with a finding of severity error", sum(bool(run.errors) for run in runs), 0)


def _whole(outcomes: Sequence[Outcome], bars: Bars) -> list[Outcome]:
    return [outcome for outcome in outcomes if not outcome.missed and len(outcome.found) >= bars.architectures]


def _headline(options: argparse.Namespace) -> str:
    chosen = " --quick" if options.quick else ""
    chosen += f" --architectures {' '.join(options.architectures)}" if options.architectures else ""
    versions = f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}"
    return f"`python -m {MARKER}{chosen}`, {datetime.now(UTC):%Y-%m-%d}, {versions}."


if __name__ == "__main__":
    sys.exit(main())
