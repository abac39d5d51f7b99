"""What `fix` says, as plain text."""

import textwrap
from collections.abc import Iterable

from attemper.checker.remedies.records import FixReport, OutputChange
from attemper.report import Report, Severity
from attemper.report.layout import number, together
from attemper.report.names import safe

WIDTH = 120


def plain_text(report: FixReport) -> str:
    """Before and after, what was changed, how far the outputs moved, and one closing line."""
    blocks = [[f"model: {safe(report.model)}", f"inputs: {safe(report.before.inputs)}", f"computed in: {report.before.dtype}"]]
    blocks.append(["before", *_figures(report.before)])
    if report.picks.any:
        blocks.append(_edits(report))
    else:
        blocks.append(["proposed", *(_proposed(report) or ["nothing: no finding has a remedy in the weights"])])
    if report.after is not None:
        blocks.append(["after, read again from what was written", *_figures(report.after)])
    if report.outputs is not None:
        blocks.append(["outputs", *_outputs(report.outputs)])
    if report.notes:
        blocks.append(["notes", *(safe(note) for note in report.notes)])
    blocks.append([_closing(report)])
    return "\n\n".join("\n".join(_block(lines, heading=0 < place < len(blocks) - 1)) for place, lines in enumerate(blocks))


def _block(lines: list[str], *, heading: bool) -> Iterable[str]:
    for place, line in enumerate(lines):
        indent = "  " if heading and place else ""
        yield textwrap.fill(
            line, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False, break_long_words=False
        )


def _figures(report: Report) -> list[str]:
    totals = report.totals
    codes = [f"{code} {severity} in {places}" for code, severity, places in _found(report)]
    largest = f"largest logit {number(totals.max_logit)}, largest |q·k| {number(totals.product_absmax)}"
    return [
        f"findings: {', '.join(codes) or 'none'}",
        f"{largest}, fp16 room {number(totals.headroom_float16)}×, saturated {totals.saturated_share:.2%}",
    ]


def _found(report: Report) -> list[tuple[str, Severity, str]]:
    counts: dict[tuple[str, Severity], int] = {}
    for finding in report.findings:
        counts[finding.code, finding.severity] = counts.get((finding.code, finding.severity), 0) + 1
    return [(code, severity, f"{n} place" if n == 1 else f"{n} places") for (code, severity), n in counts.items()]


def _proposed(report: FixReport) -> list[str]:
    return [f"{each.option}  for {', '.join(each.codes)}: {each.words}" for each in report.proposals]


def _edits(report: FixReport) -> list[str]:
    lines = ["changed" if report.out else "would be changed"]
    for clip in report.clips:
        heads = ", ".join(map(str, clip.heads))
        where = "q's and k's projections" if clip.on == "both" else "q's projection"
        lines.append(
            f"{safe(clip.module) or 'the model'} head {heads}: {number(clip.maximum)} by {clip.factor:.5g}, through {where}"
        )
    by_dtype: dict[tuple[str, float], list[str]] = {}
    for each in report.changed:
        by_dtype.setdefault((each.dtype, each.least), []).append(safe(each.tensor))
    worst = {dtype: max(each.rounding for each in report.changed if each.dtype == dtype) for dtype, _ in by_dtype}
    least_of = "at least " if report.clips else ""
    for (dtype, least), names in by_dtype.items():
        how = f"multiplied by {least_of}{least:.6g}, rounded by up to {worst[dtype]:.1e} of a number"
        lines.append(f"{together(names)} ({dtype}): {how}")
    lines += [f"config.json: {name} {old!r} becomes {new!r}" for name, old, new in report.settings]
    return lines if len(lines) > 1 else [*lines, "nothing: no head is over the threshold, and the two rules are one"]


def _outputs(change: OutputChange) -> list[str]:
    size = f"{number(change.largest)} (their root mean square is {number(change.typical)}), relative {change.relative:.2e}"
    lines = [f"{change.what} at {change.positions} positions: largest difference {size}"]
    if change.kl is not None:
        lines.append(f"KL of the distributions over tokens: mean {change.kl:.2e} nats, largest {change.kl_largest:.2e}")
    if change.loss_before is not None and change.loss_after is not None:
        lines.append(
            f"loss on the next token: {change.loss_before:.5f} before, {change.loss_after:.5f} after "
            f"({change.loss_after - change.loss_before:+.2e})"
        )
    return lines


def _closing(report: FixReport) -> str:
    if report.out:
        return f"Written to {safe(report.out)}."
    by_hand = "what a factory builds is in no folder, so that it can only be edited in Python, with attemper.weights."
    if report.picks.any:
        return "Nothing was written." if report.writable else f"Nothing was written: {by_hand}"
    if report.proposals and report.writable:
        return "Nothing was picked, so nothing was written: pass one of the options above and --out DIR."
    if report.proposals:
        return f"Nothing was picked: pass one of the options above and --dry-run to see what it would do; {by_hand}"
    return "Nothing to fix, nothing was written."
