"""What a preset measures beyond the trainings: once, when they are over, and kept as `further.parquet` beside the table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attemper.errors import LoadError
from attemper.lab.presets.preset import Effort, Further
from attemper.lab.store.files import to_parquet
from attemper.lab.store.results import RunResult
from attemper.report.files import write_whole

NAME = "further.parquet"


def further_rows(folder: Path, further: Further | None, results: Sequence[RunResult], effort: Effort) -> list[Any]:
    """The rows of the measurement, read if they are there, else measured and written; none without a measurement.

    Raises:
        LoadError: the file is not one that the lab wrote.
    """
    if further is None:
        return []
    path = folder / NAME
    if not path.exists():
        write_rows(path, further, further.measure(results, effort))
    return read_rows(path, further)


def write_rows(path: Path, further: Further, rows: Sequence[Any]) -> None:
    """A column a field of the rows."""
    import pyarrow as pa

    columns = {name: [getattr(row, name) for row in rows] for name in further.row._fields}
    write_whole(path, to_parquet(pa.table(columns)))


def read_rows(path: Path, further: Further) -> list[Any]:
    """The inverse of `write_rows`.

    Raises:
        LoadError: the file is not one that the lab wrote.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return [further.row(**row) for row in parquet.read_table(path).to_pylist()]
    except (OSError, TypeError, pa.ArrowException) as error:
        raise LoadError(f"{path}: {error}; expected what this preset measures; delete it to have it measured anew") from error
