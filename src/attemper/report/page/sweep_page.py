"""The page of a sweep: the question, the answer with its number, what it rests on, and what it does not show."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attemper.report.names import safe
from attemper.report.page.drawings import drawn
from attemper.report.page.requirements import require_page
from attemper.report.page.shell import render_page
from attemper.report.sweeps import Chart, HeatMap, SweepView, Table

if TYPE_CHECKING:
    from markupsafe import Markup


@dataclass(frozen=True)
class _Figure:
    title: str
    note: str
    light: Markup
    dark: Markup


def sweep_page(view: SweepView) -> str:
    """The sweep as one HTML file, as text.

    Raises:
        MissingExtraError: a package of the extra `html` is absent.
    """
    require_page()
    answer = view.answer
    return render_page(
        "sweep.html.j2",
        styles=("check.css", "sweep.css"),
        scripts=[],
        data={},
        title=f"attemper lab: {safe(view.name)}",
        name=safe(view.name),
        question=safe(view.question),
        sentence=safe(answer.sentence),
        number=safe(answer.number),
        facts=view_facts(view),
        figures=[_figure(chart) for chart in (*answer.charts, *answer.maps)],
        tables=[_safe(table) for table in answer.tables],
        limits=[safe(each) for each in answer.limits],
        sources=[safe(each) for each in view.sources],
    )


def view_facts(view: SweepView) -> list[tuple[str, str]]:
    """What stands under the answer, as label and text."""
    return [
        ("made by", safe(view.command)),
        ("runs", f"{view.runs}"),
        ("training", f"{view.seconds:.0f} s in all, on {safe(view.machine)}"),
    ]


def _figure(chart: Chart | HeatMap) -> _Figure:
    # An own text's path is part of an arm's name where paths were varied.
    if isinstance(chart, Chart):
        chart = replace(chart, series=tuple(replace(each, name=safe(each.name)) for each in chart.series))
    else:
        chart = replace(chart, rows=tuple(map(safe, chart.rows)), columns=tuple(map(safe, chart.columns)))
    themes = drawn(chart)
    return _Figure(safe(chart.title), safe(chart.note), themes["light"], themes["dark"])


def _safe(table: Table) -> Table:
    rows = tuple(tuple(safe(cell) for cell in row) for row in table.rows)
    return Table(safe(table.title), tuple(safe(cell) for cell in table.header), rows, safe(table.note))
