"""A run as JSON lines: the first says what run it is, each further one is a logged step with everything in it.

What it must hold:
- a line is written with one call and handed to the system before `log` returns, so that a kill tears at most the last line;
- any JSON parser reads it: no NaN and no Infinity, which JSON does not have;
- the reader goes backwards from the end, so that the last steps of a long run cost no more than themselves.
"""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

from attemper.errors import ArgumentError, LoadError
from attemper.monitor.records import COLUMNS, FIGURES, NORMS, LayerRecord, Run, RunInfo, StepRecord
from attemper.monitor.trackers.locking import Lock
from attemper.monitor.trackers.places import writable
from attemper.monitor.trackers.rows import alarm_from, fields_of, info_from, number_from
from attemper.stats.numbers import to_json

_FORMAT = 1
_BLOCK = 1 << 20
_EXPECTED = "a run that JSONLines wrote"


class JSONLines:
    """Writes one line a logged step, with every figure of every head; a kill loses nothing that was logged.

    Args:
        path: the file. Folders on the way to it are made.
        resume: go on with the run that is there, if one is. A step that is not beyond the last one begins a new attempt: what was
            logged from that step on stays in the file, and `read_run` leaves it out.

    Raises:
        ArgumentError: by `begin`, if something is there and `resume` is not set, if what is there is a run of another model, or
            if another tracker or process is writing it, or nothing can be written there. A run without any step, left by a start
            that failed, is written over.
        LoadError: by `begin`, if what is there is no run.
    """

    def __init__(self, path: "str | os.PathLike[str]", *, resume: bool = False) -> None:
        self.path, self.resume = Path(path), resume
        self._stream: BinaryIO  # from begin on
        self._lock: Lock | None = None
        self._last, self._attempt = -1, 0

    def begin(self, run: RunInfo) -> None:
        """Write the first line, or find the end of the run that is there."""
        with writable("path", self.path), ExitStack() as stack:
            if self.path.is_dir():
                raise ArgumentError("path", f"a folder, {self.path}", "the name of a file")
            self.path.parent.mkdir(parents=True, exist_ok=True)
            stream = stack.enter_context(self.path.open("ab"))
            lock = Lock("path", self.path)
            stack.callback(lock.release)
            if self.path.stat().st_size:
                self._check_present(run)
            stack.pop_all()
        self._stream, self._lock = stream, lock
        self._write({"kind": "run", "format": _FORMAT, "info": fields_of(run)})

    def log(self, record: StepRecord) -> None:
        """Write one line."""
        if record.step <= self._last:
            self._attempt += 1
        self._last = record.step
        self._write(
            {
                "kind": "step",
                "step": record.step,
                "attempt": self._attempt,
                "time": record.time,
                "scalars": {name: to_json(float(value)) for name, value in record.scalars.items()},
                "alarms": [fields_of(alarm) for alarm in record.alarms],
                "layers": [_layer(layer) for layer in record.layers],
            }
        )

    def close(self) -> None:
        """Close the file."""
        self._stream.close()
        if self._lock is not None:
            self._lock.release()

    def _check_present(self, run: RunInfo) -> None:
        with self.path.open("rb+") as stream:
            end = _end(stream)
            if _is_free(self.path, stream, end):
                end = 0
            elif not self.resume:
                given = f"{self.path}, which is there already"
                raise ArgumentError("path", given, "a new file, or resume=True to go on with that run")
            elif end == 0:
                raise LoadError(f"{self.path}: no line of it is complete; expected {_EXPECTED}")
            else:
                check_same_model(_info(self.path, stream), run, self.path)
                step = next(_steps(self.path, stream))
                self._last, self._attempt = step["step"], step["attempt"]
            stream.truncate(end)

    def _write(self, line: dict[str, Any]) -> None:
        self._stream.write((json.dumps(line, allow_nan=False) + "\n").encode())
        self._stream.flush()


def check_same_model(present: RunInfo, run: RunInfo, path: Path) -> None:
    """Refuse to go on with the run of another model.

    Raises:
        ArgumentError: it is one.
    """
    if present.model != run.model:
        raise ArgumentError("path", f"{path}, a run of {present.model}", f"a run of {run.model} to go on with, or another path")


def read(path: Path, after: int | None = None, last: int | None = None) -> Run:
    """The run in that file; see `read_run`."""
    with path.open("rb") as stream:
        return _assemble(path, _info(path, stream), _steps(path, stream), after, last)


def _layer(record: LayerRecord) -> dict[str, Any]:
    return {
        "layer": record.layer,
        "call": record.call,
        "norms": None
        if record.norms is None
        else [to_json(x) for x in (record.norms.query, record.norms.key, record.norms.value)],
        "figures": {figure.name: [to_json(value) for value in figure.of(record).tolist()] for figure in FIGURES},
    }


def _assemble(path: Path, info: RunInfo, steps: Iterator[dict[str, Any]], after: int | None, last: int | None) -> Run:
    """Steps come last first. One that is not before all that came counts for nothing: training went back beyond it later."""
    kept: list[dict[str, Any]] = []
    attempt = 0
    for step in steps:
        attempt = max(attempt, step["attempt"])
        if after is not None and step["step"] <= after:
            break
        if not kept or step["step"] < kept[-1]["step"]:
            kept.append(step)
        if len(kept) == last:
            break
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    scalars, alarms = {}, []
    for step in reversed(kept):
        try:
            scalars[step["step"]] = {name: number_from(value) for name, value in step["scalars"].items()}
            alarms += [alarm_from(fields) for fields in step["alarms"]]
            for layer in step["layers"]:
                _add_layer(columns, step, layer)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise LoadError(f"{path}: step {step['step']} has a fault ({error!r}); expected {_EXPECTED}") from error
    return Run(info, columns, scalars, tuple(alarms), attempt)


def _add_layer(columns: dict[str, list[Any]], step: dict[str, Any], layer: dict[str, Any]) -> None:
    heads = len(layer["figures"][FIGURES[0].name])
    norms = [None] * len(NORMS) if layer["norms"] is None else [number_from(value) for value in layer["norms"]]
    same = {"step": step["step"], "time": float(step["time"]), "layer": layer["layer"], "call": layer["call"]}
    for name, value in (*same.items(), *zip(NORMS, norms, strict=True)):
        columns[name] += [value] * heads
    columns["head"] += range(heads)
    for figure in FIGURES:
        # A figure that a later version added is not in an earlier one's file.
        values = layer["figures"].get(figure.name, [None] * heads)
        if len(values) != heads:
            raise ValueError(f"{figure.name} of {len(values)} heads beside {heads}")
        columns[figure.name] += values if figure.whole else [number_from(value) for value in values]


def _info(path: Path, stream: BinaryIO) -> RunInfo:
    stream.seek(0)
    line = stream.readline(_BLOCK)
    if not line:
        raise LoadError(f"{path}: it is empty; expected {_EXPECTED}")
    if not line.endswith(b"\n"):
        raise LoadError(f"{path}: its first line is not complete; expected {_EXPECTED}")
    first = _parsed(path, line)
    if first.get("kind") != "run" or first.get("format") != _FORMAT:
        given = f"kind {first.get('kind')!r}, format {first.get('format')!r}"
        raise LoadError(f"{path}: its first line has {given}; expected {_EXPECTED}: kind 'run', format {_FORMAT}")
    try:
        return info_from(first["info"])
    except (KeyError, TypeError) as error:
        raise LoadError(f"{path}: its first line has a fault ({error!r}); expected {_EXPECTED}") from error


def _steps(path: Path, stream: BinaryIO) -> Iterator[dict[str, Any]]:
    """The logged steps, last first."""
    for line in _lines_backwards(stream):
        parsed = _parsed(path, line)
        if parsed.get("kind") == "run":  # at the beginning, and wherever it was resumed
            continue
        if parsed.get("kind") != "step" or not all(type(parsed.get(name)) is int for name in ("step", "attempt")):
            raise LoadError(f"{path}: a line is neither a run nor a step: {_shown(line)}; expected {_EXPECTED}")
        yield parsed


def _parsed(path: Path, line: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path}: a complete line cannot be read: {_shown(line)}; expected {_EXPECTED}") from error
    if not isinstance(parsed, dict):
        raise LoadError(f"{path}: a line is no object: {_shown(line)}; expected {_EXPECTED}")
    return parsed


def _shown(line: bytes) -> str:
    return repr(line[:60].decode("utf-8", "replace"))


def _lines_backwards(stream: BinaryIO) -> Iterator[bytes]:
    """Complete lines, last first. What stands behind the last end of a line was torn by a kill, or is just being written."""
    position, rest, block = _end(stream), b"", _BLOCK
    while position > 0:
        start = max(0, position - block)
        stream.seek(start)
        read = stream.read(position - start) + rest
        position = start
        rest, *lines = read.split(b"\n")
        yield from (line for line in reversed(lines) if line)
        block = _BLOCK if lines else 2 * block  # a line longer than a block
    if rest:
        yield rest


def _end(stream: BinaryIO) -> int:
    """Where the last complete line ends; 0 if none is complete."""
    position = stream.seek(0, os.SEEK_END)
    while position > 0:
        start = max(0, position - _BLOCK)
        stream.seek(start)
        found = stream.read(position - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        position = start
    return 0


def _is_free(path: Path, stream: BinaryIO, end: int) -> bool:
    """Whether no step is in it: what a start leaves that failed, or was killed, before the first one."""
    if end == 0:  # killed in the first line
        return _begins_as_run(stream)
    try:
        _info(path, stream)
        return next(_steps(path, stream), None) is None
    except LoadError:
        return False


def _begins_as_run(stream: BinaryIO) -> bool:
    stream.seek(0)
    start = b'{"kind": "run", "format": '
    return start.startswith(stream.read(len(start)))
