"""Two sweeps side by side: which fields tell them apart, and what that comes to, arm by arm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attemper.errors import LoadError
from attemper.lab.comparing import holm, spread
from attemper.lab.config import RunConfig
from attemper.lab.presets.telling import cells_of, number, versus
from attemper.lab.store.results import RunResult
from attemper.lab.sweep import read, results
from attemper.lab.table import flat, varied
from attemper.report.sweeps import Table

_NOTE = "Held-out loss in nats; the test is a paired t test over the seeds that both have; lost: pairs with a run that diverged."


def compared(one: Path, two: Path) -> Table:
    """Runs of the first sweep beside those of the second that differ only in what tells the two sweeps apart.

    A field tells them apart if no value of it is in both; where some are, runs are compared at these.

    Args:
        one, two: the folders.

    Raises:
        LoadError: a folder holds no sweep, no two runs are alike but for that, or several of one seed have the same like.
    """
    first, second = ({run: fields(run.config) for run in results(folder)} for folder in (one, two))
    # By what was asked for: of a sweep that is half over, the arms that are missing yet do not tell it apart.
    asked = [[fields(config) for config in read(folder).runs] for folder in (one, two)]
    names = sorted({name for rows in asked for row in rows for name in row})
    apart = [name for name in names if set.isdisjoint(*({str(row.get(name)) for row in rows} for rows in asked))]
    arms = sorted({_rest(row, apart) for row in first.values()} & {_rest(row, apart) for row in second.values()})
    if not arms:
        raise LoadError(
            f"{two}: no run has its like in {one}; expected two sweeps that vary in the same fields, both with runs that are over"
        )
    rows, tests = [], []
    for arm in arms:
        pair = [[run for run, row in side.items() if _rest(row, apart) == arm] for side in (first, second)]
        for folder, side in zip((one, two), pair, strict=True):
            _check_seeds(folder, side)
        tests.append(versus(pair[0], pair[1]))
        rows.append([", ".join(f"{name} = {value}" for name, value in arm if _varies(name, first, second)) or "all"])
        rows[-1] += [str(spread([run.loss for run in side])) for side in pair]
    for row, test, p in zip(rows, tests, holm([test.p for test in tests]), strict=True):
        row += [*cells_of(test), number(p), str(test.count), str(test.lost)]
    left = [sum(_rest(row, apart) not in arms for row in side.values()) for side in (first, second)]
    note = f" Runs whose like the other does not have are left out: {left[0]} and {left[1]}." if any(left) else ""
    header = ("runs", str(one), str(two), "first − second", "95 % interval", "p", "p, Holm", "seeds", "lost")
    nothing = "nothing at the runs that both have" if any(left) else "nothing: they are one sweep"
    told = ", ".join([*apart, *_other_data(first, second, apart)]) or nothing
    return Table(f"What tells them apart: {told}", header, tuple(map(tuple, rows)), _NOTE + note)


def fields(config: RunConfig) -> dict[str, Any]:
    """A configuration, flat, without the seed."""
    row = flat(config.model_dump(mode="json"))
    del row["seed"]
    return row


def _check_seeds(folder: Path, side: Sequence[RunResult]) -> None:
    """One run counted with several seeds' worth of pairs would make a p that is none."""
    if len({run.config.seed for run in side}) == len(side):
        return
    several = sorted(varied([fields(run.config) for run in side]))  # of one arm: all of them tell the sweeps apart
    raise LoadError(
        f"{folder}: it varies in {', '.join(several)}, of which the other sweep has none of the values, so that several of its "
        "runs of one seed have the same like there; expected fields in which the sweeps differ to be the same in all runs of each"
    )


def _other_data(
    first: dict[RunResult, dict[str, Any]], second: dict[RunResult, dict[str, Any]], apart: Sequence[str]
) -> list[str]:
    """The same configuration may have learned from a text that was edited, or from the topics of another Python."""
    data = [{run.data for run in side} for side in (first, second)]
    return [] if data[0] & data[1] or any(name.startswith("task.") for name in apart) else ["the data that they learned from"]


def _rest(row: dict[str, Any], apart: list[str]) -> tuple[tuple[str, str], ...]:
    return tuple((name, str(value)) for name, value in row.items() if name not in apart)


def _varies(name: str, *sides: dict[RunResult, dict[str, Any]]) -> bool:
    return len({str(row.get(name)) for side in sides for row in side.values()}) > 1
