"""A report as plain text, without any package: what `str(report)` gives."""

import textwrap
from collections.abc import Mapping, Sequence

from attemper.report import layout
from attemper.report.records import Outcome

WIDTH = 120


def plain_text(report: Outcome, rule_names: Mapping[str, str] | None = None, extra: Sequence[tuple[str, list[str]]] = ()) -> str:
    """Heading, table, findings, what was not seen, notes, and one closing line.

    Args:
        rule_names: a few words for each code, to stand beside it. extra: titled lists to stand before the closing line.
    """
    blocks = ["\n".join(f"{label}: {text}" for label, text in layout.heading(report))]
    if report.rows:
        blocks.append(table_text(*layout.table(report), layout.COLUMNS, layout.LEGEND))
    if report.weights:
        blocks.append(table_text(*layout.weights_table(report), layout.WEIGHT_COLUMNS, layout.WEIGHT_LEGEND))
    blocks += [_group(group, (rule_names or {}).get(group.code, "")) for group in layout.groups(report)]
    blocks += [list_text(title, lines) for title, lines in layout.missed(report)]
    if noted := layout.notes(report):
        blocks.append(list_text("notes", noted))
    blocks += [list_text(title, texts) for title, texts in extra]
    blocks.append(_wrapped(layout.closing(report), ""))
    return "\n\n".join(blocks)


def table_text(shared: str, rows: list[list[str]], columns: Sequence[str], legend: str) -> str:
    """Columns under their names, the first one to the left, with what the rows share above and the legend below."""
    lines = [list(columns), *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(columns))]
    text = [
        "  ".join(
            cell.ljust(width) if not column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    title = [f"layer = {shared}"] if shared else []
    return "\n".join([*title, text[0], "-" * len(text[0]), *(line.rstrip() for line in text[1:]), _wrapped(legend, "")])


def _group(group: layout.Group, name: str) -> str:
    title = f"{group.code} {group.severity} {name}".rstrip()
    lines = [f"{title} ({group.places} {'place' if group.places == 1 else 'places'})"]
    lines += [_wrapped(f"{place}: {message}", "  ") for place, message in group.messages]
    if group.more:
        lines.append(f"  and {group.more} more")
    lines += [
        _wrapped(f"{label}: {text}", "  ")
        for label, text in (("cost", group.cost), ("remedy", group.remedy), ("source", group.source))
    ]
    return "\n".join(lines)


def list_text(title: str, lines: Sequence[str]) -> str:
    """A title, and lines under it that are wrapped and indented."""
    return "\n".join([title, *(_wrapped(line, "  ") for line in lines)])


def _wrapped(text: str, indent: str) -> str:
    return textwrap.fill(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False, break_long_words=False
    )
