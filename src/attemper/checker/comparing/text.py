"""A comparison as plain text: what was compared, a row for each pair of calls, and the verdict."""

import math
import textwrap

from attemper.checker.comparing.records import Outcome, PairRow
from attemper.report.layout import number
from attemper.report.names import safe, shortened

WIDTH = 120
COLUMNS = ("layer", "heads", "factor", "inherited", "own", "logits differ", "allowed", "share", "output differs", "")
LEGEND = (
    "factor: least squares of B's s·q·k on A's. inherited: what A's rule makes of A's and of B's q and k; own: what the two "
    "rules make of B's q and k. logits differ: by how much at most, a row's common offset apart. allowed: what rounding "
    "explains, in the same head; share: of it. output differs: by how much at most, or the "
    "two widths of a head's output. <- beyond it."
)


def plain_text(comparison: Outcome) -> str:
    """The whole comparison."""
    dtypes = comparison.dtypes
    head = [
        f"A: {safe(comparison.a)}, computed in {dtypes[0]}",
        f"B: {safe(comparison.b)}, computed in {dtypes[1]}",
        f"inputs: {safe(comparison.inputs)}",
    ]
    blocks = ["\n".join(head)]
    if comparison.rows:
        blocks.append(_table(comparison.rows))
    blocks.append(_verdict(comparison))
    for title, lines in (
        ("not compared", [f"{module or 'the model itself'}: {reason}" for module, reason in comparison.unseen]),
        ("notes", list(comparison.notes)),
    ):
        if lines:
            blocks.append("\n".join([title, *(_wrapped(safe(line), "  ") for line in lines)]))
    return "\n\n".join(blocks)


def _table(rows: tuple[PairRow, ...]) -> str:
    lines = [list(COLUMNS), *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    text = []
    for line in lines:
        cells = [
            cell.ljust(width) if not column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        text.append("  ".join(cells).rstrip())
    return "\n".join([text[0], "-" * len(text[0]), *text[1:], _wrapped(LEGEND, "")])


def _cells(row: PairRow) -> list[str]:
    place = shortened(safe(row.a)) or "(model)"
    if row.b != row.a:
        place += f" | {shortened(safe(row.b)) or '(model)'}"
    if row.call:
        place += f" call {row.call}"
    return [
        place,
        str(row.heads),
        _factor(row),
        _small(row.inherited),
        _small(row.own),
        _small(row.logits),
        _small(row.allowed),
        f"{row.share:.0%}" if row.share < 100 else f"{row.share:.0f}×",
        _output(row),
        "<-" if row.parts else "",
    ]


def _factor(row: PairRow) -> str:
    if not math.isnan(row.factor):
        return f"{row.factor:.6f}"
    return "all are 0" if row.pairs else "no pairs"


def _output(row: PairRow) -> str:
    if row.value_widths[0] != row.value_widths[1]:
        return f"widths {row.value_widths[0]}, {row.value_widths[1]}"
    return "—" if row.output is None else _small(row.output)


def _verdict(comparison: Outcome) -> str:
    parting, rows = comparison.parting, comparison.rows
    if parting is None:
        if not rows:
            return "Nothing to compare: no attention call was seen."
        if comparison.equal:
            return _wrapped(
                f"Attention is alike: {len(rows)} pairs of calls, and no difference at all{_outputs(comparison)}.", ""
            )
        top = max(rows, key=lambda row: row.share)
        words = (
            f"Attention is alike: {len(rows)} pairs of calls differ by rounding alone; at most {top.share:.0%} of what it "
            f"explains is used, in {_place(top)}. The difference of the logits goes from "
            f"{_small(rows[0].logits)} in the first call to {_small(rows[-1].logits)} in the last{_outputs(comparison)}."
        )
        return _wrapped(words, "")
    where = "after the last pair of calls" if rows else "before any pair of calls"
    if parting.row < len(rows):
        row = rows[parting.row]
        where = f"at {_place(row)}"
        where += f" (B: {safe(row.b) or 'the model itself'})" if row.b != row.a else ""
        heads = (
            "all heads"
            if len(parting.heads) == row.heads
            else f"head{'s' if len(parting.heads) > 1 else ''} {', '.join(map(str, parting.heads))}"
        )
        where += f", {heads}" if parting.heads else ""
    factor = f", factor {number(parting.factor)}" if parting.factor is not None else ""
    lines = [
        _wrapped(f"They part {where}: {parting.cause}{factor}.", ""),
        _wrapped(safe(_sentence(parting.explanation)), "  "),
    ]
    lines += [_wrapped(f"also: {safe(_sentence(each))}", "  ") for each in parting.also]
    return "\n".join(lines)


def _outputs(comparison: Outcome) -> str:
    """What is said of the outputs where they do not part."""
    if not comparison.outputs:
        return "; the outputs were not compared, as there are none of one shape"
    if comparison.equal:
        return ", nor in the outputs"
    gap = comparison.outputs[-1]
    return f"; the outputs differ by {_small(gap.difference)} at most (rounding explains {_small(gap.allowed)})"


def _place(row: PairRow) -> str:
    return (shortened(safe(row.a)) or "the model itself") + (f" call {row.call}" if row.call else "")


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."


def _small(value: float) -> str:
    return "0" if value == 0 else f"{value:.2g}"


def _wrapped(text: str, indent: str) -> str:
    return textwrap.fill(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )
