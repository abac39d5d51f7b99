"""Reads a run back from what a tracker wrote, while it is written or after."""

import os
from pathlib import Path
from typing import get_args

from attemper.errors import ArgumentError, LoadError
from attemper.monitor.records import COLUMNS, FIGURES, Run, Severity
from attemper.monitor.trackers import json_lines, parquet_folder

__all__ = ["Run", "read_run"]

_EXPECTED = "the file of JSONLines or the folder of Parquet"
_TEXT, _WHOLE, _NUMBER, _NONE = frozenset({str}), frozenset({int}), frozenset({float, int}), frozenset({type(None)})
_WORDS = {str: "text", int: "a whole number", float: "a number", type(None): "nothing"}
_SEVERITIES = get_args(Severity)
_YEAR_10000 = 253_402_300_800  # in seconds since the epoch: calendars end before it
_INFO = (
    dict.fromkeys(("model", "mode", "version"), _TEXT) | dict.fromkeys(("every", "rows", "world"), _WHOLE) | {"started": _NUMBER}
)
_ALARM = dict.fromkeys(("code", "severity", "layer", "figure", "message"), _TEXT) | dict.fromkeys(("step", "call"), _WHOLE)
_ALARM |= {"head": _WHOLE | _NONE, "value": _NUMBER, "threshold": _NUMBER}
_COLUMNS = dict.fromkeys(COLUMNS, _NUMBER | _NONE) | dict.fromkeys(("step", "call", "head"), _WHOLE)
_COLUMNS |= {"layer": _TEXT, "time": _NUMBER} | {figure.name: _WHOLE | _NONE for figure in FIGURES if figure.whole}


def read_run(path: "str | os.PathLike[str]", after: int | None = None, last: int | None = None) -> Run:
    """Read what `JSONLines` or `Parquet` wrote, up to the last step that was logged; the run may still be going on.

    Args:
        path: the file of `JSONLines`, or the folder of `Parquet`.
        after: answer with the steps beyond this one alone, without reading the rest. Where the answer's `attempt` is not that of
            the answer before, training has gone back, and steps that were read before may be superseded: read the whole again.
        last: answer with so many steps at most, the last ones, without reading the rest.

    Raises:
        ArgumentError: `last` is not above 0.
        LoadError: there is no run, or not one that can be read.
        MissingExtraError: it is a folder of `Parquet`, and pyarrow is not installed.
    """
    path = Path(path)
    if last is not None and last < 1:
        raise ArgumentError("last", last, "a number of steps, from 1")
    try:
        if not path.exists():
            raise LoadError(f"{path}: nothing is there; expected {_EXPECTED}")
        run = parquet_folder.read(path, after, last) if path.is_dir() else json_lines.read(path, after, last)
    except OSError as error:
        raise LoadError(f"{path}: {error.strerror or type(error).__name__}; expected {_EXPECTED}") from error
    try:
        _check(run)
    except ValueError as error:
        raise LoadError(f"{path}: {error}; expected a run as a tracker wrote it, not changed since") from error
    return run


def _check(run: Run) -> None:
    """Every part is of its kind, so that whoever shows the run need not ask.

    Raises:
        ValueError: one is not, and which.
    """
    for name, kinds in _INFO.items():
        value = getattr(run.info, name)
        _expect(f"{name} of the run", type(value) in kinds, value, kinds)
    if not 0 <= run.info.started < _YEAR_10000:
        raise ValueError(f"started of the run is {run.info.started!r}, no time in seconds since the epoch")
    for name, values in run.columns.items():
        kinds = _COLUMNS[name]
        if not set(map(type, values)) <= kinds:
            row = next(row for row, value in enumerate(values) if type(value) not in kinds)
            _expect(f"{name} at step {run.columns['step'][row]}", False, values[row], kinds)
    before = -1
    for row, head in enumerate(run.columns["head"]):
        if head not in (0, before + 1):
            place = f"layer {run.columns['layer'][row]!r} at step {run.columns['step'][row]}"
            raise ValueError(f"head of {place} is {head}, not 0 or one more than that before it")
        before = head
    for step, scalars in run.scalars.items():
        for name, value in scalars.items():
            _expect(f"scalar {name!r} at step {step}", type(value) in _NUMBER, value, _NUMBER)
    for alarm in run.alarms:
        for name, kinds in _ALARM.items():
            value = getattr(alarm, name)
            _expect(f"{name} of an alarm at step {alarm.step!r}", type(value) in kinds, value, kinds)
        if alarm.severity not in _SEVERITIES:
            raise ValueError(
                f"severity of an alarm at step {alarm.step} is {alarm.severity!r}, not one of {', '.join(_SEVERITIES)}"
            )


def _expect(what: str, fits: bool, given: object, kinds: frozenset[type]) -> None:
    if not fits:
        raise ValueError(f"{what} is {given!r}, not {' or '.join(sorted(_WORDS[kind] for kind in kinds))}")
