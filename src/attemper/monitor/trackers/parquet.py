"""A run as a folder of Parquet files, one row a head of a layer of a logged step, that any reader of Parquet takes as it lies.

What it must hold, at every moment, whatever kills the process:
- each step that was logged is in the folder, once: `pyarrow.parquet.read_table(folder)` sees it, and sees it once;
- the files do not become many: a step a file would be a hundred thousand files.

No file system takes several files away and puts one in their place in one act, so that small files cannot be joined without a
moment at which a row is there twice or not at all. So the last file grows: it is written anew with the step's rows behind those
that it had, beside its place, and moved there. When it has enough rows the next one begins, and it is never touched again.
"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attemper.errors import ArgumentError, LoadError
from attemper.monitor.records import RunInfo, StepRecord
from attemper.monitor.trackers.json_lines import check_same_model
from attemper.monitor.trackers.locking import Lock
from attemper.monitor.trackers.parquet_folder import (
    FORMAT,
    INFO,
    SIDE,
    files_of,
    heads_schema,
    info_of,
    pyarrow_here,
    steps_schema,
    table_of,
    write_lasting,
    write_table,
)
from attemper.monitor.trackers.places import make_folder
from attemper.monitor.trackers.rows import fields_of, rows_of

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS = 16384  # of a file; what is written anew at each step is half of it on average
_STEPS = 1024  # the same for the table of steps


class Parquet:
    """Writes every figure of every head at every logged step into a folder; a kill loses nothing that was logged.

    Args:
        folder: where; made if it is not there.
        resume: go on with the run that is there, if one is. A step that is not beyond the last one begins a new attempt: what was
            logged from that step on stays there, under the earlier number in the column `attempt`, and `read_run` leaves it out.

    Raises:
        ArgumentError: by `begin`, if something is there and `resume` is not set, if what is there is a run of another model, or
            if another tracker or process is writing it, or nothing can be written there. A run without any step, left by a start
            that failed, is written over.
        LoadError: by `begin`, if what is there is no run.
        MissingExtraError: by `begin`, without pyarrow.
    """

    def __init__(self, folder: "str | os.PathLike[str]", *, resume: bool = False) -> None:
        self.folder, self.resume = Path(folder), resume
        self._last, self._attempt = -1, 0
        self._lock: Lock | None = None
        self._heads: _Growing  # from begin on, as the next one
        self._steps: _Growing

    def begin(self, run: RunInfo) -> None:
        """Make the folder, or find the end of the run that is there."""
        arrow = pyarrow_here()
        make_folder("folder", self.folder)
        lock = Lock("folder", self.folder)
        try:
            self._check_present(run)
        except BaseException:
            lock.release()
            raise
        self._lock = lock
        (self.folder / SIDE).mkdir(exist_ok=True)
        if not (self.folder / INFO).exists():
            text = json.dumps({"format": FORMAT, "info": fields_of(run)}, allow_nan=False)
            write_lasting(self.folder / INFO, text.encode())
        about = {"attemper.run": json.dumps(fields_of(run), allow_nan=False)}
        self._heads = _Growing(self.folder, heads_schema(arrow).with_metadata(about), _ROWS)
        self._steps = _Growing(self.folder / SIDE, steps_schema(arrow).with_metadata(about), _STEPS)

    def log(self, record: StepRecord) -> None:
        """Write the rows of the step, then the line of the step: it is there for `read_run` when both are."""
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
        """Let others write there; each step is written as it is logged."""
        if self._lock is not None:
            self._lock.release()

    def _check_present(self, run: RunInfo) -> None:
        if self._is_free():
            (self.folder / INFO).unlink(missing_ok=True)
            return
        if not self.resume:
            given = f"{self.folder}, where something is already"
            raise ArgumentError("folder", given, "an empty or new folder, or resume=True to go on with the run that is there")
        check_same_model(info_of(self.folder), run, self.folder)
        for folder in (self.folder, self.folder / SIDE):
            for left in folder.glob(".*.tmp"):
                left.unlink()
        files = files_of(self.folder / SIDE)
        if files:
            steps = table_of(self.folder / SIDE / files[-1].name, ["step"]).column("step").to_pylist()
            self._last, self._attempt = max(steps), files[-1].attempt
        self._remove_unfinished()

    def _is_free(self) -> bool:
        """Whether nothing is there, or what a start leaves that failed, or was killed, before the first step."""
        present = {path.name for path in self.folder.iterdir() if not path.name.startswith(".")}
        side = self.folder / SIDE
        if not present <= {INFO, SIDE} or (side.exists() and any(not path.name.startswith(".") for path in side.iterdir())):
            return False
        if INFO in present:
            try:
                info_of(self.folder)
            except LoadError:
                return False
        return True

    def _remove_unfinished(self) -> None:
        """Take away rows of the one step whose line was not written any more: resumed, it comes again."""
        files = files_of(self.folder)
        if not files:
            return
        path = self.folder / files[-1].name
        table = table_of(path)
        pairs = list(zip(table.column("attempt").to_pylist(), table.column("step").to_pylist(), strict=True))
        kept = sum(pair <= (self._attempt, self._last) for pair in pairs)  # of rows in order: how many stand before it
        if kept == 0:
            path.unlink()
        elif kept < len(pairs):
            write_table(path, table.slice(0, kept))


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
        write_table(path, whole)
        self._tables, self._rows, self._attempt, self._path = [whole], whole.num_rows, attempt, path
