"""What the text of a report says, whatever it looks like: heading, table, groups of findings, lists, one closing line."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from attemper.report.names import safe, shortened
from attemper.report.records import Finding, LayerRow, Outcome, Severity

COLUMNS = ("layer", "heads", "max logit", "centred", "entropy", "saturated", "gain", "fp16 room", "scale")
LEGEND = (
    "max logit and centred (max − mean of a row): largest of any head. entropy, saturated and gain: means over all heads of H / "
    "ln(keys), of rows with a weight above 0.99, of 1 − Σp²; a finding has its worst head's. fp16 room: 65504 / largest |q·k|. "
    "scale: factor on q·k, a…b where it varies."
)
WEIGHT_COLUMNS = ("layer", "heads", "logit bound", "‖W_q‖", "‖W_k‖", "‖W_v‖", "behind")
WEIGHT_LEGEND = (
    "logit bound: of the worst head, scale·‖W_q‖·‖W_k‖·‖x‖² with biases, which no input exceeds; — where ‖x‖ is not known. "
    "‖W‖: spectral norms of the whole projections. behind: the norm that bounds x, in cross attention those of q's and k's."
)
_MOST_MESSAGES = 6
_MOST_LISTED = 10


@dataclass(frozen=True)
class Group:
    """Findings of one code and severity, folded: the rule's name is added by the renderer that knows it.

    Attributes:
        code, severity: of all of them; places: how many.
        messages: (where, what), the first few, worst first; places that say the same are one; more: how many are not listed.
        cost, remedy, source: of the first.
    """

    code: str
    severity: Severity
    places: int
    messages: tuple[tuple[str, str], ...]
    more: int
    cost: str
    remedy: str
    source: str


def heading(report: Outcome) -> tuple[tuple[str, str], ...]:
    """(label, text) pairs for the top of the report."""
    return (("model", safe(report.model)), ("inputs", safe(report.inputs)), ("computed in", safe(report.dtype)))


def table(report: Outcome) -> tuple[str, list[list[str]]]:
    """(what all layer names have in common, with * for the rest; one row of cells for each call)."""
    names = [safe(row.module) or "(model)" for row in report.rows]
    if len(report.rows) > 1 and len(set(names)) == 1:
        return shortened(names[0]), [[f"call {row.call}", *_figures(row)] for row in report.rows]
    shared, shown = apart(names)
    shown = [shortened(name) for name in shown]
    repeated = {row.module for row in report.rows if row.call}
    cells = []
    for name, row in zip(shown, report.rows, strict=True):
        place = f"{name} call {row.call}" if row.module in repeated else name
        cells.append([place, *_figures(row)])
    return shared, cells


def weights_table(report: Outcome) -> tuple[str, list[list[str]]]:
    """As `table`, of the weights."""
    shared, shown = apart([safe(row.module) or "(model)" for row in report.weights])
    shown = [shortened(name) for name in shown]
    cells = []
    for name, row in zip(shown, report.weights, strict=True):
        norms = [row.query_norm, row.key_norm, row.value_norm]
        bound = number(max(row.bounds)) if row.bounds else "—"
        cells.append(
            [name, str(row.heads), bound, *("—" if norm is None else number(norm) for norm in norms), safe(row.norm) or "—"]
        )
    return shared, cells


def groups(report: Outcome) -> list[Group]:
    """The findings, errors first, those of one code and severity together."""
    return [_fold(findings) for findings in grouped(report)]


def grouped(report: Outcome) -> list[list[Finding]]:
    """The findings of each code and severity, errors first, the worst of a code first."""
    together: dict[tuple[Severity, str], list[Finding]] = {}
    for finding in report.findings:
        together.setdefault((finding.severity, finding.code), []).append(finding)
    order = sorted(together, key=lambda key: list(Severity).index(key[0]))
    return [sorted(together[key], key=distance, reverse=True) for key in order]


def missed(report: Outcome) -> tuple[tuple[str, list[str]], ...]:
    """(title, one line for each reason): what was not looked at, and which modules, by weights alone, have no bound."""
    named = (("not seen", not_seen(report)), ("no bound", unbounded(report)))
    return tuple((title, _by_reason(found)) for title, found in named if found)


def not_seen(report: Outcome) -> list[tuple[str, str]]:
    """(module, reason) of what was not looked at."""
    weighed = {row.module for row in report.weights}
    return [(module, reason) for module, reason in report.unseen if module not in weighed]


def unbounded(report: Outcome) -> list[tuple[str, str]]:
    """(module, reason) of what was looked at by its weights, and whose logits have no bound."""
    weighed = {row.module for row in report.weights}
    return [(module, reason) for module, reason in report.unseen if module in weighed]


def notes(report: Outcome) -> list[str]:
    """What a reader should know."""
    return [safe(note) for note in report.notes]


def suppressed(report: Outcome) -> list[str]:
    """The findings that a baseline names, one line each."""
    return [
        f"{each.code} {each.severity} {place(each.module, each.call or None)}: {safe(each.message)}" for each in report.suppressed
    ]


def closing(report: Outcome) -> str:
    """Counts and overall figures in one line."""
    if not report.looked_at:
        return "Nothing to check: no attention call was seen."
    counts = ", ".join(plural(report.count(severity), _NOUNS[severity]) for severity in Severity)
    if report.suppressed:
        counts += f"; {len(report.suppressed)} old (in the baseline)"
    if report.weights:
        bounds = [max(row.bounds) for row in report.weights if row.bounds]
        heads = sum(row.heads for row in report.weights)
        largest = f" Largest bound on a logit {number(max(bounds))}." if bounds else ""
        return f"{plural(len(report.weights), 'attention module')}, {plural(heads, 'head')}, by weights alone: {counts}.{largest}"
    totals = report.totals
    return (
        f"{plural(totals.calls, 'attention call')}, {plural(totals.heads, 'head')}, {plural(totals.rows, 'row')}: {counts}. "
        f"Largest logit {number(totals.max_logit)}, fp16 room {number(totals.headroom_float16)}×, "
        f"mean normalized entropy {form(totals.mean_normalized_entropy, '.4f')}, mean gain {form(totals.mean_gain, '.4f')}, "
        f"saturated {form(totals.saturated_share, '.2%')}."
    )


def number(value: float) -> str:
    """Five digits, plain where that is readable."""
    if math.isnan(value):
        return "—"
    if math.isinf(value):
        return "inf" if value > 0 else "−inf"
    return f"{value:.5g}".replace("-", "−")


def listed(names: Sequence[str], most: int = _MOST_LISTED) -> str:
    """Names with commas, the first few."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def form(value: float, layout: str) -> str:
    """A number by a format such as ".3f", a dash where there is none."""
    return "—" if math.isnan(value) else format(value, layout)


def plural(count: int, noun: str) -> str:
    """A count with its noun."""
    return f"{count} {noun}" if count == 1 or noun == "info" else f"{count} {noun}s"


def place(module: str, call: int | None = None) -> str:
    """A module's name made safe to show, and which call of it."""
    name = safe(module) or "the model"
    return name if call is None else f"{name} call {call}"


def together(names: Sequence[str]) -> str:
    """Several module names as one: "blocks.[0, 1, 3].attention" where they differ in one number, else the first few."""
    prefix, suffix = _common(names)
    middles = [_parts(name)[len(prefix) : len(_parts(name)) - len(suffix)] for name in names]
    if len(names) > 1 and all(len(middle) == 1 and middle[0].isdecimal() for middle in middles):
        numbers = sorted({int(middle[0]) for middle in middles})
        within = (
            f"{numbers[0]}-{numbers[-1]}" if numbers == list(range(numbers[0], numbers[-1] + 1)) else ", ".join(map(str, numbers))
        )
        return shortened(".".join([*prefix, f"[{within}]", *suffix]))
    return listed([shortened(name) for name in names], 4)


_NOUNS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "info"}


def _by_reason(found: Iterable[tuple[str, str]]) -> list[str]:
    modules: dict[str, list[str]] = {}
    for module, reason in found:
        modules.setdefault(safe(reason), []).append(shortened(safe(module)) or "the model itself")
    return [f"{listed(names, 4)}: {reason}" for reason, names in modules.items()]


def _figures(row: LayerRow) -> list[str]:
    stats = row.stats
    return [
        str(stats.rows.shape[0]),
        number(float(stats.max.max())),
        number(float(stats.centred_max.max())),
        _mean(stats.mean_normalized_entropy, stats.softmax_rows, "{:.3f}"),
        _mean(stats.saturated_share, stats.softmax_rows, "{:.1%}"),
        _mean(stats.mean_gain, stats.rows - stats.nonfinite_rows, "{:.3f}"),
        _room(float(stats.product_absmax.max())),
        _scale(row),
    ]


def _scale(row: LayerRow) -> str:
    if row.scale is not None or row.scales is None or not row.scales.values:
        return "—" if row.scale is None else number(row.scale)
    return f"{number(min(row.scales.values))}…{number(max(row.scales.values))}"


def _mean(values: torch.Tensor, weights: torch.Tensor, form: str) -> str:
    known = weights > 0
    if not bool(known.any()):
        return "—"
    return form.format(float((values * weights)[known].sum() / weights[known].sum()))


def _room(product: float) -> str:
    if not product > 0:
        return "—"
    return f"{number(torch.finfo(torch.float16).max / product)}×" if math.isfinite(product) else "0×"


def _fold(findings: list[Finding]) -> Group:
    first = findings[0]
    places: dict[str, list[str]] = {}
    for finding in findings:
        places.setdefault(safe(finding.message), []).append(place(finding.module, finding.call or None))
    messages = [(together(names), message) for message, names in places.items()]
    return Group(
        code=first.code,
        severity=first.severity,
        places=len(findings),
        messages=tuple(messages[:_MOST_MESSAGES]),
        more=max(0, len(messages) - _MOST_MESSAGES),
        cost=safe(first.cost),
        remedy=safe(first.remedy),
        source=safe(first.source),
    )


def distance(finding: Finding) -> float:
    """How far beyond its threshold, to list the worst first; the order is kept where there is no number."""
    if finding.measured is None or math.isnan(finding.measured):
        return 0.0
    return abs(finding.measured - (finding.threshold or 0.0))


def apart(names: list[str]) -> tuple[str, list[str]]:
    """What names have in common, with * for the rest, and the rest of each; ("", the names) where that is nothing."""
    prefix, suffix = _common(names)
    if not prefix and not suffix:
        return "", names
    rest = [".".join(_parts(name)[len(prefix) : len(_parts(name)) - len(suffix)]) for name in names]
    return shortened(".".join([*prefix, "*", *suffix])), rest


def _parts(name: str) -> list[str]:
    return name.split(".")


def _common(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """The leading and trailing parts that all names share, never a whole name."""
    split = [_parts(name) for name in dict.fromkeys(names)]
    if len(split) < 2:
        return [], []
    room = min(map(len, split)) - 1
    prefix = _shared(split, room)
    suffix = _shared([parts[::-1] for parts in split], room - len(prefix))
    return prefix, suffix[::-1]


def _shared(split: Iterable[Sequence[str]], room: int) -> list[str]:
    found = []
    for _, column in zip(range(room), zip(*split, strict=False), strict=False):
        if len(set(column)) > 1:
            break
        found.append(column[0])
    return found
