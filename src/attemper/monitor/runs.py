"""Reads a run back from what a tracker wrote, while it is written or after."""

import os
from pathlib import Path

from attemper.errors import ArgumentError, LoadError
from attemper.monitor.records import Run
from attemper.monitor.trackers import json_lines, parquet_folder

__all__ = ["Run", "read_run"]


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
    if not path.exists():
        raise LoadError(f"{path}: nothing is there; expected the file of JSONLines or the folder of Parquet")
    return parquet_folder.read(path, after, last) if path.is_dir() else json_lines.read(path, after, last)
