"""How presets say what they found: a test beside every difference, and in words what diverged, what is missing, how few seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attemper.lab.comparing import Paired, corrected, paired, spread
from attemper.lab.presets.grouping import by_seed
from attemper.lab.store.results import RunResult
from attemper.report.sweeps import Table

NONE = paired([], [])  # where an arm is missing
Value = Callable[[RunResult], float]
Runs = Sequence[RunResult]


def final_loss(run: RunResult) -> float:
    """The held-out loss at the end; NaN of a run that diverged."""
    return run.loss


def versus(one: Runs, two: Runs, value: Value = final_loss) -> Paired:
    """First minus second over the seeds that both have."""
    pairs = by_seed(one, two)
    return paired([value(a) for a, _ in pairs], [value(b) for _, b in pairs])


def against_base(
    arms: Mapping[Any, Runs], base: Callable[[Any], Any], value: Value = final_loss, also: Mapping[Any, Paired] | None = None
) -> dict[Any, Paired]:
    """Every arm against the one that it is measured by, with Holm's correction: all tests of an answer, in sentence and table.

    Args:
        arms: runs by a key. base: the key that an arm is compared with; itself, or one that is not there: with none.
        value: of a run. also: tests that the sentence makes beside these, by names of their own.

    Returns:
        The tests by the arms' keys, then those of `also`.
    """
    tests = {key: versus(runs, arms[base(key)], value) for key, runs in arms.items() if base(key) != key and base(key) in arms}
    return corrected(tests | dict(also or {}))


def verdict(test: Paired, more: str, less: str) -> str:
    """`more` or `less` where the test tells the sign of the difference; else that it does not, or that there is no pair."""
    if not test.count:
        return "cannot be compared with"
    if not test.clear:
        return "is not told apart from"
    return more if test.mean > 0 else less


def losses_told(arms: Mapping[Any, Runs], counted: str = "in no mean and no test") -> str:
    """A sentence, with a space before it, on runs that diverged and on seeds that not every arm has; "" where all is whole.

    Args:
        arms: runs by a key. counted: what became of the runs that diverged.
    """
    parts = []
    gone = [(key, sum(run.status == "diverged" for run in runs), len(runs)) for key, runs in arms.items()]
    gone = [each for each in gone if each[1]]
    if gone:
        named = "; ".join(f"{label(key)}: {lost} of {count}" for key, lost, count in gone[:6])
        more = f"; and {len(gone) - 6} more arms, see the table" if len(gone) > 6 else ""
        parts.append(f"Diverged, and thus {counted}: {named}{more}.")
    seeds = {key: {run.config.seed for run in runs} for key, runs in arms.items()}
    every = set().union(*seeds.values()) if seeds else set()
    short = [f"{label(key)} has {len(found)}" for key, found in seeds.items() if found != every]
    if short:
        parts.append(f"Of {len(every)} seeds {', '.join(short[:6])}; tests take the seeds that both sides have.")
    return "".join(f" {part}" for part in parts)


def label(key: Any) -> str:
    """An arm in words: its parts side by side."""
    return ", ".join(str(part) for part in key) if isinstance(key, tuple) else str(key)


def few_seeds(arms: Mapping[Any, Runs]) -> str:
    """The sentence on what so many seeds can show."""
    count = max((len(runs) for runs in arms.values()), default=0)
    if count < 2:
        return f"{count} seed: no test is possible, and none is made."
    floor = 0.5 ** (count - 1)  # every difference of one sign
    return (
        f"{count} seeds: the paired t test takes the differences as normal and sees large gaps alone; a rank "
        "test, which does not, "
        f"could not fall below p = {floor:.2g}."
    )


def compared_table(
    title: str,
    names: Sequence[str],
    arms: Mapping[Any, Runs],
    tests: Mapping[Any, Paired],
    *,
    against: str = "1/√d",
    value: Value = final_loss,
    what: str = "loss, nats",
    note: str = "",
) -> Table:
    """One row an arm: mean and spread of a value, and the paired difference from the arm that it is measured by.

    Args:
        title, note: of the table. names: headings of the parts of an arm's key.
        arms: by a key that is a tuple with one part a heading. tests: what `against_base` gave for them.
        against: what the other is called. value: of a run. what: its heading.
    """
    rows = []
    for key, runs in arms.items():
        test = tests.get(key)
        cells = ("",) * 5 if test is None else (*cells_of(test), number(test.raised), str(test.count))
        diverged = sum(run.status == "diverged" for run in runs)
        rows.append((*map(str, key), str(spread([value(run) for run in runs])), *cells, f"{diverged} of {len(runs)}"))
    header = (*names, what, f"minus {against}", "95 % interval", "p", "p, Holm", "pairs", "diverged")
    reading = (
        "Mean ± standard deviation over the seeds. The difference is taken seed by seed: the same seed draws the "
        "same examples, and "
        "to models of the same layers the same weights. p is that of a paired t test; Holm's counts in how many tests there are, "
        "here and in the sentence."
    )
    return Table(title, header, tuple(rows), f"{reading} {note}".strip())


def cells_of(test: Paired) -> tuple[str, str, str]:
    """Difference, interval, p as text; "" where there is none."""
    interval = "" if math.isnan(test.low) else f"{test.low:+.3f} to {test.high:+.3f}"
    return "" if math.isnan(test.mean) else f"{test.mean:+.3f}", interval, number(test.p)


def number(value: float, form: str = ".2g") -> str:
    """A number as text, "" for NaN."""
    return "" if math.isnan(value) else f"{value:{form}}"


def signed(test: Paired, unit: str, digits: int = 3) -> str:
    """The difference to stand large; a dash where there is none."""
    return "—" if math.isnan(test.mean) else f"{test.mean:+.{digits}f} {unit}"
