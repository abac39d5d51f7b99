"""A sweep as plain text: the answer first, then its tables."""

from __future__ import annotations

import textwrap

from attemper.report.names import safe
from attemper.report.sweeps import SweepView, Table

_LINE = 100


def sweep_text(view: SweepView, tables: bool = True) -> str:
    """The question, the answer, its limits, and with `tables` what it rests on."""
    parts = [safe(view.question), "", *_wrapped(view.answer.sentence), ""]
    if tables:
        for table in view.answer.tables:
            parts += [safe(table.title), *_aligned(table), ""]
    if view.answer.limits:
        parts.append("What this does not show:")
    for limit in view.answer.limits:
        parts += _wrapped(f"- {limit}", "  ")
    return "\n".join(parts)


def table_text(table: Table) -> str:
    """One table under its title."""
    return "\n".join([safe(table.title), "", *_aligned(table), "", *_wrapped(table.note)])


def _wrapped(text: str, hang: str = "") -> list[str]:
    return textwrap.wrap(safe(text), _LINE, subsequent_indent=hang, break_on_hyphens=False, break_long_words=False)


def _aligned(table: Table) -> list[str]:
    rows = [tuple(map(safe, row)) for row in (table.header, *table.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.header))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
