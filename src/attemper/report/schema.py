"""A report as JSON, version 2. The same as a JSON Schema: report.schema.json beside this file.

    schema     2; a reader refuses another number
    model      what was checked; inputs: on what; dtype: what was computed in (strings)
    counts     {"error": n, "warning": n, "info": n}
    totals     the figures of `Totals`, over all heads of all calls
    layers     one object for each attention call, in order:
                 module, call, seam; scale (a number, or null where it varies);
                 scales: values and by_position, as in `ScaleRange`, or null where it is not known;
                 summary: one list for each figure, a number for each head (null where there is none): max, centred_max,
                     product_absmax,
                   mean_normalized_entropy, mean_gain, mean_peak, saturated_share, headroom_float16, rows, empty_rows,
                   nonfinite_rows;
                 stats: the mergeable record, as `HeadStats.to_dict` writes it;
                 own_order: the order of operations that the model's code uses; orders: what each order does in each narrow
                   dtype, as `OrderFigures.to_dict` writes it
    findings   code, severity, module, call, heads, measured, threshold, message, source, cost, remedy, as in `Finding`
    suppressed findings that a baseline names, in the same form; counts leaves them out
    unseen     objects with module and reason
    notes      strings
    weights    with --weights-only, and none else: module, heads, bounds (a number for each head, or none), query_norm,
               key_norm, value_norm, norm, as in `WeightRow`

Infinities are the strings "inf" and "-inf", what is not a number is null: the file is JSON to every parser.
"""

import math
from dataclasses import asdict
from typing import Any

import torch

from attemper.errors import ArgumentError
from attemper.report.orders import OrderFigures
from attemper.report.records import Finding, LayerRow, Outcome, ScaleRange, Severity, WeightRow
from attemper.stats import HeadStats
from attemper.stats.numbers import from_json, to_json

SCHEMA = 2
_SUMMARY = (
    "max", "centred_max", "product_absmax", "mean_normalized_entropy", "mean_gain", "mean_peak", "saturated_share",
    "rows", "empty_rows", "nonfinite_rows",
)  # fmt: skip


def to_dict(report: Outcome) -> dict[str, Any]:
    """The report as JSON-ready data."""
    return {
        "schema": SCHEMA,
        "model": report.model,
        "inputs": report.inputs,
        "dtype": report.dtype,
        "counts": {str(severity): report.count(severity) for severity in Severity},
        "totals": {name: to_json(value) for name, value in asdict(report.totals).items()},
        "layers": [_layer(row) for row in report.rows],
        "findings": [_finding(finding) for finding in report.findings],
        "suppressed": [_finding(finding) for finding in report.suppressed],
        "unseen": [{"module": module, "reason": reason} for module, reason in report.unseen],
        "notes": list(report.notes),
        "weights": [_weights(row) for row in report.weights],
    }


def outcome_fields(data: dict[str, Any]) -> dict[str, Any]:
    """The attributes of the `Outcome` that `to_dict` wrote.

    Raises:
        ArgumentError: another version, or a part is missing.
    """
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        given = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise ArgumentError("data", f"schema {given!r}", f"a report of schema {SCHEMA}")
    try:
        rows = tuple(
            LayerRow(
                each["module"],
                each["call"],
                each["seam"],
                HeadStats.from_dict(each["stats"]),
                from_json(each["scale"]),
                _read_scales(each["scales"]),
                own_order=each["own_order"],
                orders=tuple(OrderFigures.from_dict(order) for order in each["orders"]),
            )
            for each in data["layers"]
        )
        findings = tuple(_read_finding(each) for each in data["findings"])
        suppressed = tuple(_read_finding(each) for each in data["suppressed"])
        missed = tuple((each["module"], each["reason"]) for each in data["unseen"])
        return {
            "model": data["model"],
            "inputs": data["inputs"],
            "dtype": data["dtype"],
            "rows": rows,
            "findings": findings,
            "suppressed": suppressed,
            "unseen": missed,
            "notes": tuple(data["notes"]),
            "weights": tuple(_read_weights(each) for each in data["weights"]),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ArgumentError("data", f"a report with a fault ({error!r})", "what Report.to_dict returned") from error


def _read_scales(data: Any) -> ScaleRange | None:
    if data is None:
        return None
    values = (math.nan if value is None else from_json(value) for value in data["values"])
    return ScaleRange(tuple(values), bool(data["by_position"]))


def _layer(row: LayerRow) -> dict[str, Any]:
    figures = {name: getattr(row.stats, name) for name in _SUMMARY}
    figures["headroom_float16"] = row.stats.headroom(torch.float16)
    summary = {name: [to_json(value) for value in values.tolist()] for name, values in figures.items()}
    return {
        "module": row.module,
        "call": row.call,
        "seam": row.seam,
        "scale": to_json(row.scale),
        "scales": row.scales
        and {"values": [to_json(value) for value in row.scales.values], "by_position": row.scales.by_position},
        "summary": summary,
        "stats": row.stats.to_dict(),
        "own_order": row.own_order,
        "orders": [order.to_dict() for order in row.orders],
    }


def _weights(row: WeightRow) -> dict[str, Any]:
    return {name: to_json(value) for name, value in asdict(row).items()} | {"bounds": [to_json(each) for each in row.bounds]}


def _read_weights(data: dict[str, Any]) -> WeightRow:
    query, key, value = (from_json(data[name]) for name in ("query_norm", "key_norm", "value_norm"))
    return WeightRow(data["module"], data["heads"], tuple(map(from_json, data["bounds"])), query, key, value, data["norm"])


def _finding(finding: Finding) -> dict[str, Any]:
    return {name: to_json(value) for name, value in asdict(finding).items()} | {
        "severity": str(finding.severity),
        "heads": list(finding.heads),
    }


def _read_finding(data: dict[str, Any]) -> Finding:
    return Finding(
        code=data["code"],
        severity=Severity(data["severity"]),
        module=data["module"],
        call=data["call"],
        heads=tuple(data["heads"]),
        measured=from_json(data["measured"]),
        threshold=from_json(data["threshold"]),
        message=data["message"],
        source=data["source"],
        cost=data["cost"],
        remedy=data["remedy"],
    )
