"""A run as plain text: what `attemper report RUN` prints, and `attemper top` where there is no terminal."""

from attemper.report.runs import layout
from attemper.report.runs.view import RunView
from attemper.report.text import list_text, table_text

_ALARMS = 12


def run_text(view: RunView) -> str:
    """Heading, a line for each layer, the last alarms, and one closing line."""
    blocks = ["\n".join(f"{label}: {text}" for label, text in layout.heading(view))]
    if view.layers:
        shared, rows, _ = layout.table(view)
        blocks.append(table_text(shared, rows, layout.COLUMNS, layout.LEGEND))
    told = [f"{severity} {where}: {message}" for severity, where, message in layout.alarms(view, _ALARMS)]
    if told:
        more = len(view.alarms) - len(told)
        blocks.append(list_text("alarms, the last ones first", [*told, *([f"and {more} more before"] if more else [])]))
    return "\n\n".join([*blocks, layout.closing(view)])
