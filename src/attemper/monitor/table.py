"""A record as a table of plain text."""

import math

from attemper.monitor.records import StepRecord, shown
from attemper.monitor.trackers.summary import SCALARS, worst_of


def table_of(record: StepRecord) -> str:
    """A line a layer: the worst head of each figure that trackers for people get; below, the alarms."""
    rows = [["layer", *(figure.name.replace("_", " ") for figure in SCALARS)]]
    for layer in record.layers:
        numbers = (worst_of(layer.figure(figure.name), figure.worst) for figure in SCALARS)
        rows.append([shown(layer.name) or "model", *("–" if math.isnan(number) else f"{number:.4g}" for number in numbers)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"step {record.step}" + "".join(f", {shown(name)} {value:.6g}" for name, value in record.scalars.items())]
    for name, *cells in rows:
        lines.append("  ".join([name.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(cells, widths[1:], strict=True))]))
    return "\n".join(lines + [f"{alarm.code} {alarm.severity}: {shown(alarm.message)}" for alarm in record.alarms])
