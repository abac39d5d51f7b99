"""A report on a terminal, with rich: the same words as the plain text, coloured by severity.

Text from a checkpoint only ever becomes a `Text`, which has no markup; `layout` has already written control characters out.
"""

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from attemper.report import layout
from attemper.report.records import Outcome, Severity

_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.INFO: "cyan"}
_LAYER = 16  # how narrow the column of names may become


def print_report(
    report: Outcome, console: Console, rule_names: dict[str, str], extra: Sequence[tuple[str, list[str]]] = ()
) -> None:
    """Write the report.

    Args:
        rule_names: the few words for each code. extra: titled lists to stand before the closing line.
    """
    for label, text in layout.heading(report):
        console.print(Text.assemble((f"{label}: ", "dim"), text))
    if report.rows:
        console.print()
        _print_table(*layout.table(report), layout.COLUMNS, layout.LEGEND, console)
    if report.weights:
        console.print()
        _print_table(*layout.weights_table(report), layout.WEIGHT_COLUMNS, layout.WEIGHT_LEGEND, console)
    for group in layout.groups(report):
        console.print()
        _print_group(group, console, rule_names.get(group.code, ""))
    for title, lines in (*layout.missed(report), ("notes", layout.notes(report)), *extra):
        _print_list(title, lines, console)
    console.print()
    worst = next((severity for severity in Severity if report.count(severity)), None)
    style = _STYLES[worst] if worst else "bold green" if report.looked_at else "yellow"
    console.print(Text(layout.closing(report), style=style))


def _print_table(shared: str, rows: list[list[str]], columns: Sequence[str], legend: str, console: Console) -> None:
    if shared:
        console.print(Text.assemble(("layer = ", "dim"), shared))
    table = Table(box=None, pad_edge=False, header_style="bold")
    widest = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number == 0 else "right", no_wrap=number > 0, overflow="fold")
    # Too narrow a terminal wraps a whole line; cut to its width, "14.005" would read "14.".
    narrowest = min(widest[0], _LAYER) + sum(widest[1:]) + 2 * (len(widest) - 1)
    for cells in rows:
        table.add_row(*(Text(cell) for cell in cells))
    table.width = narrowest if narrowest > console.width else None
    console.print(table, crop=False)
    console.print(Text(legend, style="dim"))


def _print_group(group: layout.Group, console: Console, name: str) -> None:
    style = _STYLES[group.severity]
    places = f"{group.places} place" if group.places == 1 else f"{group.places} places"
    console.print(Text.assemble((f"{group.code} {group.severity}", style), (f" {name}", "bold"), (f" ({places})", "dim")))
    for place, message in group.messages:
        console.print(Padding(Text.assemble((place, "bold"), ": ", message), (0, 0, 0, 2)))
    if group.more:
        console.print(Padding(Text(f"and {group.more} more", style="dim"), (0, 0, 0, 2)))
    for label, text in (("cost", group.cost), ("remedy", group.remedy), ("source", group.source)):
        console.print(Padding(Text.assemble((f"{label}: ", "dim"), text), (0, 0, 0, 2)))


def _print_list(title: str, lines: list[str], console: Console) -> None:
    if not lines:
        return
    console.print()
    console.print(Text(title, style="bold"))
    for line in lines:
        console.print(Padding(Text(line), (0, 0, 0, 2)))
