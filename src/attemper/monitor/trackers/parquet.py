"""A run as a folder of Parquet files, one row a head of a layer of a logged step, that any reader of Parquet takes as it lies.

What it must hold, at every moment, whatever kills the process:
- each step that was logged is in the folder, once: `pyarrow.parquet.read_table(folder)` sees it, and sees it once;
- the files do not become many: a step a file would be a hundred thousand files.

No file system takes several files away and puts one in their place in one act, so that small files cannot be joined without a
moment at which a row is there twice or not at all. So the last file grows: it is written anew with the step's rows behind those
that it had, beside its place, and moved there. When it has enough rows the next one begins, and it is never touched again.
"""

import itertools
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from attemper.errors import ArgumentError, LoadError, MissingExtraError
from attemper.monitor.records import COLUMNS, FIGURES, KEYS, NORMS, Run, RunInfo, StepRecord
from attemper.monitor.trackers.json_lines import check_same_model
from attemper.monitor.trackers.rows import alarm_from, fields_of, info_from, rows_of

if TYPE_CHECKING:
    import pyarrow as pa

_FORMAT = 1
_ROWS = 16384  # of a file; what is written anew at each step is half of it on average
_STEPS = 1024  # the same for the table of steps
_EXPECTED = "a run that Parquet wrote"
# Readers of folders leave out what begins with "_" or ".".
_INFO, _SIDE = "_run.json", "_steps"
_NAME = re.compile(r"(\d{4,})-(\d{12,})\.parquet")


class Parquet:
    """Writes every figure of every head at every logged step into a folder; a kill loses nothing that was logged.

    Args:
        folder: where; made if it is not there.
        resume: go on with the run that is there, if one is. A step that is not beyond the last one begins a new attempt: what was
            logged from that step on stays there, under the earlier number in the column `attempt`, and `read_run` leaves it out.

    Raises:
        ArgumentError: by `begin`, if something is there and `resume` is not set, or if what is there is a run of another model.
        LoadError: by `begin`, if what is there is no run.
        MissingExtraError: by `begin`, without pyarrow.
    """

    def __init__(self, folder: "str | os.PathLike[str]", *, resume: bool = False) -> None:
        self.folder, self.resume = Path(folder), resume
        self._last, self._attempt = -1, 0
        self._heads: _Growing | None = None
        self._steps: _Growing | None = None

    def begin(self, run: RunInfo) -> None:
        """Make the folder, or find the end of the run that is there."""
        arrow = _pyarrow()
        if self.folder.is_dir():
            self._check_present(run)
        elif self.folder.exists():
            raise ArgumentError("folder", f"a file, {self.folder}", "a folder, or a name that is not taken")
        (self.folder / _SIDE).mkdir(parents=True, exist_ok=True)
        if not (self.folder / _INFO).exists():
            text = json.dumps({"format": _FORMAT, "info": fields_of(run)}, allow_nan=False)
            _write_whole(self.folder / _INFO, text.encode())
        about = {"attemper.run": json.dumps(fields_of(run), allow_nan=False)}
        self._heads = _Growing(self.folder, _heads_schema(arrow).with_metadata(about), _ROWS)
        self._steps = _Growing(self.folder / _SIDE, _steps_schema(arrow).with_metadata(about), _STEPS)

    def log(self, record: StepRecord) -> None:
        """Write the rows of the step, then the line of the step: it is there for `read_run` when both are."""
        if self._heads is None or self._steps is None:
            raise RuntimeError("begin was not called")
        attempt = self._attempt + (record.step <= self._last)
        rows = rows_of(record)
        self._heads.add(attempt, record.step, {"attempt": [attempt] * len(rows["step"]), **rows})
        line = {
            "attempt": [attempt],
            "step": [record.step],
            "time": [record.time],
            "scalars": [[(name, float(value)) for name, value in record.scalars.items()]],
            "alarms": [[vars(alarm) for alarm in record.alarms]],
        }
        self._steps.add(attempt, record.step, line)
        self._last, self._attempt = record.step, attempt

    def close(self) -> None:
        """Nothing is left to do: each step is written as it is logged."""

    def _check_present(self, run: RunInfo) -> None:
        present = [path for path in self.folder.iterdir() if not path.name.startswith(".")]
        if not present:
            return
        if not self.resume:
            given = f"{self.folder}, where something is already"
            raise ArgumentError("folder", given, "an empty or new folder, or resume=True to go on with the run that is there")
        if {path.name for path in present} == {_SIDE} and not any((self.folder / _SIDE).iterdir()):
            return  # killed while it was made
        check_same_model(_info(self.folder), run, self.folder)
        for folder in (self.folder, self.folder / _SIDE):
            for left in folder.glob(".*.tmp"):
                left.unlink()
        files = _files(self.folder / _SIDE)
        if files:
            steps = _table(self.folder / _SIDE / files[-1].name, ["step"]).column("step").to_pylist()
            self._last, self._attempt = max(steps), files[-1].attempt
        self._remove_unfinished()

    def _remove_unfinished(self) -> None:
        """Take away rows of the one step whose line was not written any more: resumed, it comes again."""
        files = _files(self.folder)
        if not files:
            return
        path = self.folder / files[-1].name
        table = _table(path)
        pairs = list(zip(table.column("attempt").to_pylist(), table.column("step").to_pylist(), strict=True))
        kept = sum(pair <= (self._attempt, self._last) for pair in pairs)  # of rows in order: how many stand before it
        if kept == 0:
            path.unlink()
        elif kept < len(pairs):
            _write_table(path, table.slice(0, kept))


class _Growing:
    """The last file of a folder, which is written anew with more in it until it is large enough."""

    def __init__(self, folder: Path, schema: "pa.Schema", limit: int) -> None:
        self.folder, self.schema, self.limit = folder, schema, limit
        self._tables: list[pa.Table] = []
        self._rows, self._attempt = 0, -1
        self._path = folder

    def add(self, attempt: int, step: int, columns: dict[str, list[Any]]) -> None:
        import pyarrow as pa

        table = pa.table(columns, schema=self.schema)
        if table.num_rows == 0:
            return
        new = not self._tables or self._rows >= self.limit or attempt != self._attempt
        path = self.folder / f"{attempt:04d}-{step:012d}.parquet" if new else self._path
        tables = [table] if new else [*self._tables, table]
        whole = pa.concat_tables(tables).combine_chunks()
        _write_table(path, whole)
        self._tables, self._rows, self._attempt, self._path = [whole], whole.num_rows, attempt, path


class _File(NamedTuple):
    attempt: int
    step: int
    name: str


def read(folder: Path, after: int | None = None) -> Run:
    """The run in that folder; see `read_run`."""
    arrow = _pyarrow()
    info = _info(folder)
    try:
        # The table of steps first: whatever it names is in the other by then, however the run goes on.
        files = _files(folder / _SIDE)
        attempt = files[-1].attempt if files else 0
        spans = {each: _span(files, each, after) for each in {file.attempt for file in files}}
        steps = _rows(folder / _SIDE, files, spans, _steps_schema(arrow)).to_pylist()
        # A file that begins with a step beyond them is being written, or is what a kill left and resuming takes away.
        last = max(((row["attempt"], row["step"]) for row in steps), default=(-1, -1))
        begun = [file for file in _files(folder) if (file.attempt, file.step) <= last]
        heads = _rows(folder, begun, spans, _heads_schema(arrow))
        heads = heads.filter(arrow.compute.is_in(heads["step"], arrow.array([row["step"] for row in steps], arrow.int64())))
        columns = {name: heads.column(name).to_pylist() for name in COLUMNS}
        for figure in FIGURES:
            if not figure.whole:  # one that a later version added is not in an earlier one's files
                columns[figure.name] = [float("nan") if value is None else value for value in columns[figure.name]]
        scalars = {row["step"]: dict(row["scalars"]) for row in steps}
        alarms = tuple(alarm_from(alarm) for row in steps for alarm in row["alarms"])
    except (KeyError, TypeError, ValueError, OSError, arrow.ArrowException) as error:
        raise LoadError(f"{folder}: a file has a fault ({error}); expected {_EXPECTED}") from error
    return Run(info, columns, scalars, alarms, attempt)


def _span(files: list[_File], attempt: int, after: int | None) -> tuple[int, int]:
    """The steps of an attempt that count, from the first to before the second: later attempts supersede theirs."""
    begins = [file.step for file in files if file.attempt > attempt]
    return -1 if after is None else after + 1, min(begins, default=1 << 62)


def _rows(folder: Path, files: list[_File], spans: dict[int, tuple[int, int]], schema: "pa.Schema") -> "pa.Table":
    import pyarrow as pa
    from pyarrow import compute

    tables = [schema.empty_table()]
    for file, following in itertools.zip_longest(files, files[1:]):
        first, end = spans[file.attempt]
        before_next = following is not None and following.attempt == file.attempt and following.step <= first
        if file.step < end and not before_next:
            table = _table(folder / file.name)
            tables.append(table.filter((compute.field("step") >= first) & (compute.field("step") < end)))
    # Where a file of an earlier version has a column less, it is filled with nulls.
    return pa.concat_tables(tables, promote_options="default")


def _files(folder: Path) -> list[_File]:
    """Its files of rows, in order. Each is named after the attempt and the step that it begins with."""
    found = []
    for path in folder.glob("*.parquet"):
        if path.name.startswith((".", "_")):
            continue
        match = _NAME.fullmatch(path.name)
        if match is None:
            raise LoadError(f"{folder}: {path.name} is not a file of a run; expected {_EXPECTED}, and nothing else in its folder")
        found.append(_File(int(match[1]), int(match[2]), path.name))
    return sorted(found)


def _table(path: Path, columns: list[str] | None = None) -> "pa.Table":
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(path).read(columns)
    except (ValueError, OSError) as error:  # what pyarrow raises
        raise LoadError(f"{path}: it cannot be read ({error}); expected {_EXPECTED}") from error


def _info(folder: Path) -> RunInfo:
    path = folder / _INFO
    if not path.is_file():
        raise LoadError(f"{folder}: it has no {_INFO}; expected {_EXPECTED}")
    try:
        present = json.loads(path.read_bytes())
        if present["format"] != _FORMAT:
            raise LoadError(f"{path}: it has format {present['format']!r}; expected {_FORMAT}")
        return info_from(present["info"])
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise LoadError(f"{path}: it has a fault ({error!r}); expected {_EXPECTED}") from error


def _heads_schema(arrow: Any) -> "pa.Schema":
    types = dict(zip(KEYS, (arrow.int64(), arrow.float64(), arrow.string(), arrow.int64(), arrow.int64()), strict=True))
    types |= {figure.name: arrow.int64() if figure.whole else arrow.float64() for figure in FIGURES}
    types |= dict.fromkeys(NORMS, arrow.float64())
    return arrow.schema([("attempt", arrow.int64()), *((name, types[name]) for name in COLUMNS)])


def _steps_schema(arrow: Any) -> "pa.Schema":
    text, whole, number = arrow.string(), arrow.int64(), arrow.float64()
    alarm = arrow.struct(
        [
            *(("code", text), ("severity", text), ("step", whole), ("layer", text), ("call", whole), ("head", whole)),
            *(("figure", text), ("value", number), ("threshold", number), ("message", text)),
        ]
    )
    columns = [("attempt", whole), ("step", whole), ("time", number), ("scalars", arrow.map_(text, number))]
    return arrow.schema([*columns, ("alarms", arrow.list_(alarm))])


def _pyarrow() -> Any:
    try:
        import pyarrow as pa
        import pyarrow.compute
    except ImportError as error:
        raise MissingExtraError("pyarrow", "parquet", "write and read runs as Parquet") from error
    return pa


def _write_table(path: Path, table: "pa.Table") -> None:
    import pyarrow as pa
    from pyarrow import parquet

    sink = pa.BufferOutputStream()
    parquet.write_table(table, sink, use_dictionary=[name for name in ("layer",) if name in table.column_names])
    _write_whole(path, sink.getvalue())


def _write_whole(path: Path, data: Any) -> None:
    """Write beside the place and move there, so that a reader sees the old file or the new one, also after a kill."""
    beside = path.with_name(f".{path.name}.tmp")
    with beside.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    beside.replace(path)
    if os.name != "nt":  # the move is in the folder, which is written on its own
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
