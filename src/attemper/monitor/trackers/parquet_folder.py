"""A run's folder of Parquet files: how its files are named and put in place, and how it is read."""

import itertools
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from attemper.errors import LoadError, MissingExtraError
from attemper.files import flush_folder, write_whole
from attemper.monitor.records import COLUMNS, FIGURES, KEYS, NORMS, Run, RunInfo
from attemper.monitor.trackers.rows import alarm_from, info_from

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = 1
# Readers of folders leave out what begins with "_" or ".".
INFO, SIDE = "_run.json", "_steps"
_NAME = re.compile(r"(\d{4,})-(\d{12,})\.parquet")
_EXPECTED = "a run that Parquet wrote"


class File(NamedTuple):
    """A file of rows: the attempt and the step that it begins with, and its name."""

    attempt: int
    step: int
    name: str


def read(folder: Path, after: int | None = None, last: int | None = None) -> Run:
    """The run in that folder; see `read_run`."""
    arrow = pyarrow_here()
    info = info_of(folder)
    try:
        # The table of steps first: whatever it names is in the other by then, however the run goes on.
        files = files_of(folder / SIDE)
        attempt = files[-1].attempt if files else 0
        after = after if last is None else _before_last(folder / SIDE, files, after, last)
        spans = {each: _span(files, each, after) for each in {file.attempt for file in files}}
        steps = _rows(folder / SIDE, files, spans, steps_schema(arrow)).to_pylist()
        # A file that begins with a step beyond them is being written, or is what a kill left and resuming takes away.
        newest = max(((row["attempt"], row["step"]) for row in steps), default=(-1, -1))
        begun = [file for file in files_of(folder) if (file.attempt, file.step) <= newest]
        heads = _rows(folder, begun, spans, heads_schema(arrow))
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


def _span(files: list[File], attempt: int, after: int | None) -> tuple[int, int]:
    """The steps of an attempt that count, from the first to before the second: later attempts supersede theirs."""
    begins = [file.step for file in files if file.attempt > attempt]
    return -1 if after is None else after + 1, min(begins, default=1 << 62)


def _before_last(folder: Path, files: list[File], after: int | None, last: int) -> int | None:
    """`after`, or a later step if no more than the `last` steps of the run are beyond that one."""
    missing = last
    for file in reversed(files):
        first, end = _span(files, file.attempt, after)
        found = sorted(step for step in table_of(folder / file.name, ["step"]).column("step").to_pylist() if first <= step < end)
        if len(found) >= missing:
            return found[-missing] - 1
        missing -= len(found)
    return after


def _rows(folder: Path, files: list[File], spans: dict[int, tuple[int, int]], schema: "pa.Schema") -> "pa.Table":
    import pyarrow as pa
    from pyarrow import compute

    tables = [schema.empty_table()]
    for file, following in itertools.zip_longest(files, files[1:]):
        first, end = spans[file.attempt]
        before_next = following is not None and following.attempt == file.attempt and following.step <= first
        if file.step < end and not before_next:
            table = table_of(folder / file.name)
            tables.append(table.filter((compute.field("step") >= first) & (compute.field("step") < end)))
    # Where a file of an earlier version has a column less, it is filled with nulls.
    return pa.concat_tables(tables, promote_options="default")


def files_of(folder: Path) -> list[File]:
    """Its files of rows, in order. Each is named after the attempt and the step that it begins with."""
    found = []
    for path in folder.glob("*.parquet"):
        if path.name.startswith((".", "_")):
            continue
        match = _NAME.fullmatch(path.name)
        if match is None:
            raise LoadError(f"{folder}: {path.name} is not a file of a run; expected {_EXPECTED}, and nothing else in its folder")
        found.append(File(int(match[1]), int(match[2]), path.name))
    return sorted(found)


def table_of(path: Path, columns: list[str] | None = None) -> "pa.Table":
    """The table in that file.

    Raises:
        LoadError: it is no Parquet file, or not a whole one.
    """
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(path).read(columns)
    except (ValueError, OSError) as error:  # what pyarrow raises
        raise LoadError(f"{path}: it cannot be read ({error}); expected {_EXPECTED}") from error


def info_of(folder: Path) -> RunInfo:
    """What was known as the run in that folder began.

    Raises:
        LoadError: it is no folder of a run.
    """
    path = folder / INFO
    if not path.is_file():
        raise LoadError(f"{folder}: it has no {INFO}; expected {_EXPECTED}")
    try:
        present = json.loads(path.read_bytes())
        if present["format"] != FORMAT:
            raise LoadError(f"{path}: it has format {present['format']!r}; expected {FORMAT}")
        return info_from(present["info"])
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise LoadError(f"{path}: it has a fault ({error!r}); expected {_EXPECTED}") from error


def heads_schema(arrow: Any) -> "pa.Schema":
    """Of the table of heads, which lies in the folder itself."""
    types = dict(zip(KEYS, (arrow.int64(), arrow.float64(), arrow.string(), arrow.int64(), arrow.int64()), strict=True))
    types |= {figure.name: arrow.int64() if figure.whole else arrow.float64() for figure in FIGURES}
    types |= dict.fromkeys(NORMS, arrow.float64())
    return arrow.schema([("attempt", arrow.int64()), *((name, types[name]) for name in COLUMNS)])


def steps_schema(arrow: Any) -> "pa.Schema":
    """Of the table of steps, which lies in the folder `SIDE` in it."""
    text, whole, number = arrow.string(), arrow.int64(), arrow.float64()
    alarm = arrow.struct(
        [
            *(("code", text), ("severity", text), ("step", whole), ("layer", text), ("call", whole), ("head", whole)),
            *(("figure", text), ("value", number), ("threshold", number), ("message", text)),
        ]
    )
    columns = [("attempt", whole), ("step", whole), ("time", number), ("scalars", arrow.map_(text, number))]
    return arrow.schema([*columns, ("alarms", arrow.list_(alarm))])


def pyarrow_here() -> Any:
    """The package pyarrow.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.compute
    except ImportError as error:
        raise MissingExtraError("pyarrow", "parquet", "write and read runs as Parquet") from error
    return pa


def write_table(path: Path, table: "pa.Table") -> None:
    """Write a file of rows, whole or not at all."""
    import pyarrow as pa
    from pyarrow import parquet

    sink = pa.BufferOutputStream()
    parquet.write_table(table, sink, use_dictionary=[name for name in ("layer",) if name in table.column_names])
    write_lasting(path, memoryview(sink.getvalue()))


def write_lasting(path: Path, content: "bytes | memoryview") -> None:
    """Write a file of a run, so that it is there also after a loss of power."""
    write_whole(path, content)
    flush_folder(path.parent)
