"""What a preset measures beyond the trainings: once, when they are over, and kept as `further.parquet` beside the table."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from attemper.files import write_whole
from attemper.lab.presets.preset import Effort, Further
from attemper.lab.store.files import to_parquet
from attemper.lab.store.results import RunResult

NAME = "further.parquet"


def further_rows(folder: Path, further: Further | None, results: Sequence[RunResult], effort: Effort) -> list[Any]:
    """The rows of the measurement, read if they are there; else, or where they are not what it gives, measured and written.

    Args:
        folder: of the sweep. further: the measurement of its preset. results: the runs that ended. effort: of the sweep.

    Returns:
        A `further.row` each; none without a measurement.

    Raises:
        LoadError: a run's weights cannot be read. OSError: the file cannot be read or written.
    """
    if further is None:
        return []
    path = folder / NAME
    rows = read_rows(path, further, {result.id for result in results}) if path.exists() else None
    if rows is None:
        rows = list(further.measure(results, effort))
        write_rows(path, further, rows)
    return rows


def write_rows(path: Path, further: Further, rows: Sequence[Any]) -> None:
    """A column a field of the rows."""
    import pyarrow as pa

    columns = {name: [getattr(row, name) for row in rows] for name in further.row._fields}
    write_whole(path, to_parquet(pa.table(columns)))


def read_rows(path: Path, further: Further, ids: Collection[str]) -> list[Any] | None:
    """The inverse of `write_rows`.

    Args:
        path: the file. further: what was measured. ids: of the runs that are over.

    Returns:
        The rows; None of a file that holds something else: no table, other columns or types, or rows of other runs.

    Raises:
        OSError: it cannot be read at all.
    """
    import pyarrow as pa
    from pyarrow import parquet

    types = get_type_hints(further.row)
    content = path.read_bytes()
    try:
        rows = parquet.read_table(pa.BufferReader(content)).to_pylist()
    except (OSError, ValueError, pa.ArrowException):  # pyarrow calls broken compression an OSError
        return None
    if any(row.keys() != types.keys() or not all(_is(row[name], kind) for name, kind in types.items()) for row in rows):
        return None
    if "run" in types and any(row["run"] not in ids for row in rows):
        return None
    return [further.row(**row) for row in rows]


def _is(value: object, kind: type) -> bool:
    return isinstance(value, kind) or (kind is float and isinstance(value, int))
