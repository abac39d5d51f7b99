"""Every number of a report in words: what it is, its formula, how to read it, where it was measured (`--explain`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attemper.report import layout
from attemper.report.names import safe
from attemper.report.records import LayerRow, Outcome, ScaleRange
from attemper.report.rule import Rules

Section = tuple[str, list[str]]


@dataclass(frozen=True)
class Explained:
    """One number: what it is, its formula, how to read it, what it was measured on."""

    definition: str
    formula: str
    reading: str
    measured_on: str

    def __str__(self) -> str:
        return f"{self.definition} Formula: {self.formula}. {self.reading} Measured on {self.measured_on}."


_PAIRS = "every visible (query, key) pair of the call's heads"
_ROWS = "every real query row of the call"
_TELLING = "the rows with two visible keys or more"

COLUMN_WORDS: Mapping[str, Explained] = {
    "layer": Explained(
        "The module that called attention, in the order of the forward pass.",
        "its dotted name, without what all names share; a module that is called again has the number of the call",
        "Look it up with model.get_submodule.",
        "the forward pass",
    ),
    "heads": Explained(
        "How many query heads the call has.", "dimension -3 of the query", "Keys may have fewer.", "the call's query"
    ),
    "max logit": Explained(
        "The largest logit of any head: what enters the softmax.",
        "max z, z = scale·q·k, capped, plus bias",
        "Above 100 heads tend to saturate and training to diverge; but a large one with a small centred one is only an offset.",
        _PAIRS,
    ),
    "centred": Explained(
        "How far the best key of a row stands above the others, the largest of any row.",
        "max over rows of (max z − mean z)",
        "The softmax ignores a common offset, so this and not the largest logit decides whether a row is sharp.",
        _ROWS,
    ),
    "entropy": Explained(
        "How evenly a row spreads its weight, the mean over the rows of all heads.",
        "mean of H / ln(visible keys), H = −Σ p ln p; with a sink ln(keys + 1)",
        "1 is uniform, 0 is one key.",
        _TELLING,
    ),
    "saturated": Explained(
        "The share of rows, of all heads together, that put nearly all weight on one key.",
        "rows with max p > 0.99 / rows",
        "Such a row passes less than 2 % of the gradient; above a half the median row does.",
        _TELLING,
    ),
    "gain": Explained(
        "How much gradient reaches the logits, the mean over the rows of all heads: the trace of the softmax's Jacobian.",
        "mean of Σ p(1 − p) = 1 − Σ p²",
        "0 is a dead row, 1 − 1/keys a uniform one.",
        "the rows with a visible key and finite logits",
    ),
    "fp16 room": Explained(
        "By how much the raw products may grow before float16 overflows.",
        "65504 / max |q·k|",
        "Below 1×, code that writes the product in float16 before it scales gets infinity.",
        _PAIRS,
    ),
    "scale": Explained(
        "The factor from the projections' q·k to the logits.",
        "the call's own scale × the factors on q and k since their projections",
        "Usually 1/sqrt(d_head). Smallest…largest where it differs by head or position; — where it could not be followed.",
        "the call's arguments, and q and k against the outputs of their projections",
    ),
}

_WEIGHTS = "the weights alone, without a forward pass"

WEIGHT_COLUMN_WORDS: Mapping[str, Explained] = {
    "layer": Explained(
        "The module that projects q, k and v.",
        "its dotted name, without what all names share",
        "Look it up with model.get_submodule.",
        "the modules whose layout is known",
    ),
    "heads": Explained("How many query heads it has.", "width of all of q / width of a head", "Keys may have fewer.", _WEIGHTS),
    "logit bound": Explained(
        "What the size of no logit can exceed, whatever the input: of the head in which it is largest.",
        "scale·(‖W_q·diag(g)‖·√D + ‖W_q·b + b_q‖)·(the same of k), behind a norm of D numbers with gain g and bias b; behind "
        "QK-norm √m·max |g| over its m numbers in place of each bracket; at most the softcap",
        "That some input could reach it does not say that one does: a run shows the logits that occur. — where no norm is known "
        "that bounds the input; the list below the table says why.",
        _WEIGHTS,
    ),
    "‖W_q‖": Explained(
        "By how much the projection to q can lengthen a vector.",
        "spectral norm (largest singular value) of the whole W_q, all heads together",
        "‖W_q‖ and ‖W_k‖ far above ‖W_v‖ say that logits grew in training; behind QK-norm they say nothing.",
        _WEIGHTS,
    ),
    "‖W_k‖": Explained("The same of the projection to k.", "spectral norm of the whole W_k", "See ‖W_q‖.", _WEIGHTS),
    "‖W_v‖": Explained(
        "The same of the projection to v.",
        "spectral norm of the whole W_v",
        "What ‖W_q‖ and ‖W_k‖ are held against; — where v is not a projection of its own.",
        _WEIGHTS,
    ),
    "behind": Explained(
        "The norm whose output q and k are made of.",
        "its dotted name; QK-norm where q and k are normalised themselves; in cross attention that of the queries, and that of "
        "the encoder, of whose output keys are made",
        "— where none is known, and then there is no bound.",
        "the names of the model's modules",
    ),
}

TOTAL_WORDS: Mapping[str, str] = {
    "attention calls, heads, rows": "how many calls were seen, the sum of their heads, and of their heads' real query rows",
    "largest logit": "max z over all calls",
    "fp16 room": "65504 / max |q·k| over all calls",
    "mean normalized entropy, saturated": "over all rows with two visible keys or more, of all heads and calls",
    "mean gain": "over all rows with a visible key and finite logits",
}

WEIGHT_TOTAL_WORDS: Mapping[str, str] = {
    "attention modules, heads": "how many modules were looked at, and the sum of their heads",
    "largest bound on a logit": "the largest logit bound of any of them; absent where none has one",
}


def explained(report: Outcome, rules: Rules, thresholds: Sequence[str] = ()) -> list[Section]:
    """Titled lists of lines: the columns, the closing line, the numbers of the findings.

    Args:
        rules: all rules; thresholds: what each threshold in force says, a line each.
    """
    sections: list[Section] = []
    if report.rows:
        sections.append(("the columns", [f"{name}: {COLUMN_WORDS[name]}" for name in layout.COLUMNS]))
        varying = [f"{_place(row)}: {_by_head(row.scales)}" for row in report.rows if row.scales and row.scales.single is None]
        if varying:
            sections.append(("the scales that vary", varying))
        sections.append(("the closing line", [f"{name}: {words}" for name, words in TOTAL_WORDS.items()]))
    by_code = {rule.code: rule for rule in rules}
    if report.weights:
        sections.append(("the columns", [f"{name}: {WEIGHT_COLUMN_WORDS[name]}" for name in layout.WEIGHT_COLUMNS]))
        sections.append(("the closing line", [f"{name}: {words}" for name, words in WEIGHT_TOTAL_WORDS.items()]))
    findings = []
    for group in layout.groups(report):
        rule = by_code.get(group.code)
        if rule is None:
            continue
        worst = max((f for f in report.findings if (f.code, f.severity) == (group.code, group.severity)), key=layout.distance)
        findings.append(f"{group.code} {rule.name}: {rule.summary} {rule.why}")
        if worst.measured is None:
            findings.append(f"{group.code} measured: no single number.")
        else:
            against = f", held against {layout.number(worst.threshold)}" if worst.threshold is not None else ""
            where = f"{layout.place(worst.module, worst.call or None)}: {layout.number(worst.measured)}{against}"
            findings.append(f"{group.code} measured: {rule.measured} In {where} ({safe(worst.source)}).")
        if rule.ignore_when:
            findings.append(f"{group.code} may be ignored: {rule.ignore_when}")
    if findings:
        sections.append(("the findings", findings))
    if thresholds:
        sections.append(("the thresholds", list(thresholds)))
    return sections


def _place(row: LayerRow) -> str:
    name = safe(row.module) or "the model"
    return f"{name} call {row.call}" if row.call else name


def _by_head(scales: ScaleRange) -> str:
    if scales.by_position:
        return f"by position, from {layout.number(min(scales.values))} to {layout.number(max(scales.values))}"
    return "by head, " + ", ".join(f"{head}: {layout.number(value)}" for head, value in enumerate(scales.values))
