"""A record as rows, one a head, and the small parts of a run as dictionaries that JSON has."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from attemper.monitor.records import COLUMNS, FIGURES, NORMS, Alarm, LayerRecord, RunInfo, StepRecord
from attemper.stats.numbers import from_json, to_json


def rows_of(record: StepRecord) -> dict[str, list[Any]]:
    """One list each of `COLUMNS`, one entry a head: norms of a layer stand beside each of its heads, None where not known."""
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for layer in record.layers:
        heads = layer.stats.heads
        for name, value in _same_for_all_heads(record, layer).items():
            columns[name] += [value] * heads
        columns["head"] += range(heads)
        for figure in FIGURES:
            columns[figure.name] += figure.of(layer).tolist()
    return columns


def _same_for_all_heads(record: StepRecord, layer: LayerRecord) -> dict[str, Any]:
    norms = dataclasses.astuple(layer.norms) if layer.norms else (None,) * len(NORMS)
    return {
        "step": record.step,
        "time": record.time,
        "layer": layer.layer,
        "call": layer.call,
        **dict(zip(NORMS, norms, strict=True)),
    }


def fields_of(part: "Alarm | RunInfo") -> dict[str, Any]:
    """As JSON has it: infinities as strings, not-a-number as null."""
    return {name: to_json(value) for name, value in dataclasses.asdict(part).items()}


def alarm_from(fields: Mapping[str, Any]) -> Alarm:
    """The alarm whose `fields_of` these are.

    Raises:
        KeyError, TypeError, ValueError: they are not.
    """
    numbers: dict[str, Any] = {name: number_from(fields[name]) for name in ("value", "threshold")}
    return Alarm(**{**fields, **numbers})


def info_from(fields: Mapping[str, Any]) -> RunInfo:
    """The run whose `fields_of` these are.

    Raises:
        TypeError: they are not.
    """
    info = RunInfo(**fields)
    if not isinstance(info.model, str):
        raise TypeError(f"model {info.model!r}")
    return info


def number_from(value: Any) -> float:
    """The number that `to_json` wrote: null is not-a-number."""
    return float("nan") if value is None else float(from_json(value))
