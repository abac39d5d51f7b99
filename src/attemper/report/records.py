"""Plain records that check produces and the renderers read."""

import functools
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from attemper.errors import ArgumentError
from attemper.report.orders import OrderFigures
from attemper.stats import HeadStats


class Severity(StrEnum):
    """How bad a finding is: the result is wrong, a hazard, or a description."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


# Exit codes are an interface: they never change their meaning.
CLEAN, FOUND, COULD_NOT_RUN, NOTHING_TO_CHECK = 0, 1, 2, 3
FAIL_ON = (*Severity, "never")


@dataclass(frozen=True)
class Finding:
    """One thing found, with its measurement.

    Attributes:
        code: stable code, such as "ATT101".
        severity: see `Severity`.
        module: dotted name of the module, "" for the whole model.
        call: which call of that module (0 unless the module is shared), None where it does not apply.
        heads: head numbers concerned; empty where the finding is about the whole layer.
        measured: the measured value; threshold: what it was held against; None where there is no single number.
        message: one sentence that says what was measured, where, against what.
        source: where the threshold comes from.
        cost: what it costs; remedy: what to do.
    """

    code: str
    severity: Severity
    module: str
    call: int | None
    heads: tuple[int, ...]
    measured: float | None
    threshold: float | None
    message: str
    source: str
    cost: str
    remedy: str


@dataclass(frozen=True)
class ScaleRange:
    """The factor on q·k of one call.

    Attributes:
        values: one for all heads, or one for each; where it differs by position, the smallest and the largest.
    """

    values: tuple[float, ...]
    by_position: bool = False

    @property
    def single(self) -> float | None:
        """The one factor of the call; None where it varies."""
        return None if self.by_position or len(set(self.values)) != 1 else self.values[0]


@dataclass(frozen=True)
class LayerRow:
    """One attention call in the table.

    Attributes:
        module, call, seam: of the call; stats: its statistics per head.
        scale: its factor on q·k; None where that differs by head or position.
        scales: the factor by head or position; None where it is not known.
        own_order: the order of operations that the model's code uses, "" where nothing was run in other dtypes.
        orders: what each order does to a few rows, in each dtype.
    """

    module: str
    call: int
    seam: str
    stats: HeadStats
    scale: float | None
    scales: ScaleRange | None = None
    own_order: str = ""
    orders: tuple[OrderFigures, ...] = ()


@dataclass(frozen=True)
class WeightRow:
    """One attention module, by its weights alone.

    Attributes:
        module: dotted name; heads: of q.
        bounds: for each head, what no |scale * q·k| can exceed, whatever the input; () where the input's norm is not known.
        query_norm, key_norm, value_norm: spectral norms of the projections; None where they are not known.
        norm: name of the norm in front, which bounds the input, and in cross attention that of the encoder too; "" where none is
            known; "QK-norm" where none is needed.
    """

    module: str
    heads: int
    bounds: tuple[float, ...]
    query_norm: float | None
    key_norm: float | None
    value_norm: float | None
    norm: str = ""


@dataclass(frozen=True)
class Totals:
    """Figures over all heads of all calls.

    Attributes:
        calls, heads: how many attention calls, and heads in all of them; rows: rows of logits looked at.
        max_logit, centred_max, product_absmax: the largest ones; headroom_float16: 65504 / product_absmax.
        mean_normalized_entropy, saturated_share: over rows with two visible keys or more; mean_gain: over rows with any.
    """

    calls: int
    heads: int
    rows: int
    max_logit: float
    centred_max: float
    product_absmax: float
    headroom_float16: float
    mean_normalized_entropy: float
    mean_gain: float
    saturated_share: float


@dataclass(frozen=True)
class Outcome:
    """What was found on one model; `Report` adds its forms as text and as JSON.

    Attributes:
        model, inputs: what was checked, and on what, in words; dtype: what was computed in.
        rows: one for each attention call, in order; findings: errors first.
        unseen: (module, reason) of attention that was not looked at, and of modules in `weights` that have no bound.
        notes: what a reader should know about this run.
        suppressed: findings that a baseline names; they count nowhere.
        weights: one for each attention module, where the weights alone were looked at; there are no rows then.
    """

    model: str
    inputs: str
    dtype: str
    rows: tuple[LayerRow, ...]
    findings: tuple[Finding, ...]
    unseen: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = field(default=())
    suppressed: tuple[Finding, ...] = ()
    weights: tuple[WeightRow, ...] = ()

    def count(self, severity: Severity | str) -> int:
        """How many findings have this severity."""
        return Counter(finding.severity for finding in self.findings)[Severity(severity)]

    def exit_code(self, fail_on: str = "error") -> int:
        """0 clean, 1 findings at or above `fail_on`, 3 no attention was seen.

        Args:
            fail_on: "error", "warning", "info" or "never".

        Raises:
            ArgumentError: another word.
        """
        if fail_on not in FAIL_ON:
            raise ArgumentError("fail_on", repr(fail_on), f"one of {', '.join(FAIL_ON)}")
        if any(at_least(finding.severity, fail_on) for finding in self.findings):
            return FOUND
        return CLEAN if self.looked_at else NOTHING_TO_CHECK

    @property
    def looked_at(self) -> bool:
        """Whether any attention was, by a run or by its weights."""
        return bool(self.rows or self.weights)

    @functools.cached_property
    def totals(self) -> Totals:
        """The figures over all heads of all calls; NaN where there are no rows."""
        return _totals([row.stats for row in self.rows])


def at_least(severity: Severity, fail_on: str) -> bool:
    """Whether a finding of this severity makes a check fail.

    Args:
        fail_on: "error", "warning", "info" or "never".
    """
    order = list(Severity)
    return fail_on != "never" and order.index(severity) <= order.index(Severity(fail_on))


def _totals(stats: list[HeadStats]) -> Totals:
    def largest(name: str) -> float:
        return max((float(getattr(each, name).max()) for each in stats), default=float("nan"))

    def mean(name: str, weights: list[torch.Tensor]) -> float:
        # A head without a row has NaN for a mean, and no weight.
        total = sum(float(w.sum()) for w in weights)
        value = sum(float((getattr(each, name) * w)[w > 0].sum()) for each, w in zip(stats, weights, strict=True))
        return value / total if total else float("nan")

    finite_rows = [each.rows - each.nonfinite_rows for each in stats]
    softmax_rows = [each.softmax_rows for each in stats]
    product = largest("product_absmax")
    return Totals(
        calls=len(stats),
        heads=sum(each.rows.shape[0] for each in stats),
        rows=sum(int(each.rows.sum()) for each in stats),
        max_logit=largest("max"),
        centred_max=largest("centred_max"),
        product_absmax=product,
        headroom_float16=torch.finfo(torch.float16).max / product if product > 0 else float("inf"),
        mean_normalized_entropy=mean("mean_normalized_entropy", softmax_rows),
        mean_gain=mean("mean_gain", finite_rows),
        saturated_share=mean("saturated_share", softmax_rows),
    )
