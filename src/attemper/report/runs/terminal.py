"""A run on a terminal, with rich, cut to the height that there is: what `attemper top` shows again and again.

Text from a run only ever becomes a `Text`, which has no markup; `layout` has already written control characters out.
"""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from attemper.report.runs import layout
from attemper.report.runs.view import RunView

_STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan"}
_ALARMS = 5
_AROUND = 7  # lines that are neither a layer nor an alarm


def run_screen(view: RunView, height: int, footer: str = "") -> Group:
    """The view as it fits on a screen.

    Args:
        height: of the screen, in lines. footer: what the reader can do, as the last line.
    """
    parts: list[RenderableType] = [
        Text.assemble((f"{label}: ", "dim"), text, overflow="ellipsis", no_wrap=True) for label, text in layout.heading(view)
    ]
    told = layout.alarms(view, min(_ALARMS, max(1, height // 5)))
    if view.layers:
        shared, rows, hidden = layout.table(view, max(1, height - _AROUND - len(told)))
        parts.append(Text(f"layer = {shared}" if shared else "", style="dim", overflow="ellipsis", no_wrap=True))
        parts.append(_table(rows))
        if hidden:
            parts.append(Text(f"and {hidden} more layers with smaller |s·q·k|", style="dim"))
    for severity, where, message in told:
        parts.append(Text.assemble((f"{where} ", _STYLES[severity]), message, overflow="ellipsis", no_wrap=True))
    closing = layout.closing(view) if len(view.steps) else "No step has been logged yet."
    parts.append(Text(closing, style="bold", overflow="ellipsis", no_wrap=True))
    if footer:
        parts.append(Text(footer, style="dim"))
    return Group(*parts)


def _table(rows: list[list[str]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(layout.COLUMNS):
        table.add_column(name, justify="left" if number in (0, 3, 4) else "right", no_wrap=True, overflow="ellipsis")
    for cells in rows:
        style = "red" if cells[0].endswith("✗") else "yellow" if cells[0].endswith("!") else ""
        table.add_row(*(Text(cell) for cell in cells), style=style)
    return table
