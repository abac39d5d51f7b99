"""The summary table: one line for each model."""

from typing import Any

from attemper.checker.many.records import ManyReport, ModelResult
from attemper.report.layout import number
from attemper.report.names import safe
from attemper.report.schema import from_json

COLUMNS = ("model", "calls", "errors", "warnings", "worst", "max logit", "fp16 room", "exit")


def plain_text(report: ManyReport) -> str:
    """A table, then why models could not be checked, then one line of counts."""
    rows = [list(COLUMNS), *(_row(each) for each in report.results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    failed = [f"{safe(each.model)}: {safe(each.error)}" for each in report.results if each.exit == 2]
    if failed:
        lines += ["", "could not be checked", *(f"  {line}" for line in failed)]
    counts = {code: sum(each.exit == code for each in report.results) for code in range(4)}
    words = ("clean", "with findings", "could not be checked", "without attention")
    lines += ["", f"{len(rows) - 1} models: " + ", ".join(f"{counts[code]} {word}" for code, word in enumerate(words)) + "."]
    return "\n".join(lines)


def _row(result: ModelResult) -> list[str]:
    if result.report is None:
        return [safe(result.model), *["—"] * (len(COLUMNS) - 2), str(result.exit)]
    counts, totals, findings = (result.report[name] for name in ("counts", "totals", "findings"))
    figures = [_number(totals["max_logit"]), f"{_number(totals['headroom_float16'])}×" if totals["calls"] else "—"]
    worst = findings[0]["code"] if findings else "—"  # errors first
    return [
        safe(result.model),
        "—" if result.report.get("weights") else str(totals["calls"]),
        *map(str, (counts["error"], counts["warning"], worst)),
        *figures,
        str(result.exit),
    ]


def _number(value: Any) -> str:
    return "—" if value is None else number(float(from_json(value)))
