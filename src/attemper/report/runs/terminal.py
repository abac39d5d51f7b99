"""A run on a terminal, with rich, cut to the height that there is: what `attemper top` shows again and again.

Text from a run only ever becomes a `Text`, which has no markup; `layout` has already written control characters out.
"""

from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from attemper.report.runs import layout
from attemper.report.runs.view import RunView

_STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan"}
_ALARMS = 5
_GAP = 2  # between columns
_AROUND = 7  # lines that are neither a layer nor an alarm


def run_screen(view: RunView, height: int, footer: str = "") -> Group:
    """The view as it fits on a screen.

    Args:
        height: of the screen, in lines. footer: what the reader can do, as the last line.
    """
    parts: list[RenderableType] = [_Line(f"{label}: ", "dim", text) for label, text in layout.heading(view)]
    told = layout.alarms(view, min(_ALARMS, max(1, height // 5)))
    if view.layers:
        shared, rows, hidden = layout.table(view, max(1, height - _AROUND - len(told)))
        parts.append(Text(f"layer = {shared}" if shared else "", style="dim", overflow="ellipsis", no_wrap=True))
        parts.append(_Table(rows))
        if hidden:
            parts.append(Text(f"and {hidden} more layers with smaller |s·q·k|", style="dim"))
    for severity, where, message in told:
        parts.append(_Line(f"{where} ", _STYLES[severity], message))
    closing = layout.closing(view) if len(view.steps) else "No step has been logged yet."
    parts.append(_Line("", "", closing, "bold"))
    if footer:
        parts.append(Text(footer, style="dim"))
    return Group(*parts)


@dataclass(frozen=True)
class _Line:
    """A line that ends between two words where the screen does, so that no number is cut."""

    label: str
    label_style: str
    text: str
    style: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width - cell_len(self.label)
        text = Text.assemble((self.label, self.label_style), (_words_within(self.text, room), self.style))
        text.no_wrap, text.overflow = True, "ellipsis"
        yield text


@dataclass(frozen=True)
class _Table:
    """The layers in as many columns as there is room for; see `layout.fitted`."""

    rows: list[list[str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns, rows = layout.fitted(self.rows, options.max_width, _GAP, cell_len)
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
        for number, name in enumerate(columns):
            table.add_column(name, justify="left" if number in (0, 3, 4) else "right", no_wrap=True, overflow="ellipsis")
        for cells in rows:
            style = "red" if cells[0].endswith("✗") else "yellow" if cells[0].endswith("!") else ""
            table.add_row(*(Text(cell) for cell in cells), style=style)
        yield table


def _words_within(text: str, room: int) -> str:
    if cell_len(text) <= room:
        return text
    words = text.split(" ")
    while len(words) > 1 and cell_len(" ".join(words)) + 2 > room:
        words.pop()
    return f"{' '.join(words)} …"
