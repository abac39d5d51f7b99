"""One row a run: its configuration, flat, and what it came to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attemper.files import write_whole
from attemper.lab.store.curves import to_parquet
from attemper.lab.store.results import RunResult

NAME = "table.parquet"
TIMES = ("seconds", "tokens_per_second", "peak_mib", "machine")  # differ each time that a run is trained


def write_table(path: Path, results: Sequence[RunResult]) -> None:
    """Write the table of the runs, unless it is there already, byte for byte.

    Args:
        path: the file; what else it holds, such as half of a table, is replaced.
        results: the runs that are over, a row each. What differs each time is in the columns of `TIMES`, the last ones.

    Raises:
        OSError: it cannot be written.
    """
    import pyarrow as pa

    rows = [row_of(result) for result in results]
    names = list(dict.fromkeys(name for row in rows for name in row if name not in TIMES))
    columns = {name: [row.get(name) for row in rows] for name in (*names, *TIMES)}
    content = to_parquet(pa.table(columns))
    if not path.is_file() or path.read_bytes() != content:
        write_whole(path, content)


def row_of(result: RunResult) -> dict[str, Any]:
    """The columns of one run: `id`, the fields of the configuration by their dotted names, then the figures."""
    row: dict[str, Any] = {"id": result.id}
    row |= flat(result.config.model_dump(mode="json"))
    row |= {"status": result.status, "ended": result.ended, "loss": result.loss, "accuracy": result.accuracy}
    for evaluation in result.evaluations:
        if evaluation.kind != "validation":
            row[f"loss at {evaluation.kind} {evaluation.at:g}"] = evaluation.loss
    return row | {name: getattr(result, name) for name in TIMES}


def varied(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The fields, but for the seed, in which runs differ.

    Args:
        rows: what `flat` gave for the configuration of each; at least one.
    """
    return [name for name in rows[0] if name != "seed" and len({str(row[name]) for row in rows}) > 1]


def flat(fields: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Nested fields by dotted names; lists, and what may be a number or a list or text, as JSON."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            found |= flat(value, f"{before}{name}.")
        elif name in ("head_dim", "loss_scale") or isinstance(value, list):
            found[before + name] = json.dumps(value)
        else:
            found[before + name] = value
    return found
