"""Runs made by hand, as `read_run` gives them."""

from collections.abc import Iterable

from attemper.monitor import Alarm, RunInfo, StepRecord
from attemper.monitor.records import COLUMNS, Run
from attemper.monitor.trackers.rows import rows_of

INFO = RunInfo("Decoder", "observe", 1, 1, 1.75e9, "0.1.0")


def run_of(records: Iterable[StepRecord], attempt: int = 0, info: RunInfo = INFO) -> Run:
    """What a tracker would give back of these records."""
    columns: dict[str, list] = {name: [] for name in COLUMNS}
    scalars, alarms = {}, []
    for record in records:
        for name, values in rows_of(record).items():
            columns[name] += values
        scalars[record.step] = record.scalars
        alarms += record.alarms
    return Run(info, columns, scalars, tuple(alarms), attempt)


def alarm(step: int = 3, **changes: object) -> Alarm:
    """An alarm of head 1 of layers.0.attention."""
    whole = {
        "code": "ATT502", "severity": "error", "step": step, "layer": "layers.0.attention", "call": 0, "head": 1,
        "figure": "max_scaled_product", "value": 1234.0, "threshold": 1e3, "message": "layers.0.attention: head 1 is large.",
    }  # fmt: skip
    return Alarm(**{**whole, **changes})  # pyrefly: ignore
