"""Compares the scale that a call applies with the scale that its architecture calls for, and names the likely mistake.

What must hold: only factors are compared, never names or source text; a factor that could not be measured is replaced by the one
that the architecture itself applies; a scale behind norms on q and k is judged only where the rule of the architecture is known,
since 1.0 and 1/d_head are as legitimate there as 1/sqrt(d_head).
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from attemper.checker.scale_rules import Design
from attemper.checker.thresholds import DEFAULTS, Thresholds
from attemper.report import Severity

# Known mistakes are told apart by these; what is a finding at all is decided by the thresholds of the check.
EXACT, MEASURED = DEFAULTS.scale_exact, DEFAULTS.scale_measured


@dataclass(frozen=True)
class Applied:
    """What one call (or one head of it) does to q·k between the projections and the logits.

    Attributes:
        passed: the factor that the call itself applies.
        query, key: the factor by which q and k were multiplied since their projections, or since the norm behind them; None
            where that is not known.
        query_norm, key_norm: whether a norm lies between the projection and the call.
        fitted: `passed` was fitted to the call's output, so it is known to a few digits only.
    """

    passed: float
    query: float | None = 1.0
    key: float | None = 1.0
    query_norm: bool = False
    key_norm: bool = False
    fitted: bool = False


@dataclass(frozen=True)
class Verdict:
    """One deviation: its code, how grave it is, the effective scale, the expected one, and the likely mistake in words."""

    code: str
    severity: Severity
    effective: float
    expected: float
    cause: str

    @property
    def ratio(self) -> float:
        """How many times larger the logits are than they should be."""
        return self.effective / self.expected if self.expected else math.inf


def effective_scale(applied: Applied, design: Design) -> float:
    """passed · query · key; a factor that is unknown or grows with position counts as the design's own."""
    query = design.query if applied.query is None or _varies(applied.query, design) else applied.query
    key = design.key if applied.key is None else applied.key
    return applied.passed * query * key


def judge(
    applied: Applied,
    design: Design,
    head_dim: int,
    *,
    certain: bool = True,
    widths: Iterable[int] = (),
    limits: Thresholds = DEFAULTS,
) -> Verdict | None:
    """The verdict on one scale, or None where there is nothing to say.

    Args:
        applied: what was measured; design: what the architecture calls for.
        head_dim: width of q and k; widths: widths of the model that might have been taken for it.
        certain: whether the architecture's rule is known; otherwise 1/sqrt(d_head) is the usual choice and no more.
        limits: how far a scale may lie from the rule's.
    """
    expected = design.value
    if expected is None or expected == 0 or (not certain and (applied.query_norm or applied.key_norm)):
        return None
    effective = effective_scale(applied, design)
    if not math.isfinite(effective):
        return Verdict("ATT104", Severity.ERROR, effective, expected, "it is not a finite number")
    off = abs(effective / expected - 1)
    measured = applied.fitted or any(factor is not None and abs(factor - 1) > EXACT for factor in (applied.query, applied.key))
    if off <= (max(limits.scale_measured, limits.scale_exact) if measured else limits.scale_exact):
        return None
    if off <= limits.scale_measured:
        return Verdict("ATT104", Severity.INFO, effective, expected, _small_difference(effective, expected))
    code, cause = _likely(effective, design, applied, head_dim, certain, set(widths))
    followed = applied.query is not None and applied.key is not None
    # What is hidden in a q that was not followed may well be the factor that seems to be missing.
    perhaps_hidden = applied.query is None and not applied.query_norm and abs(effective) > abs(expected)
    weak = perhaps_hidden or (not certain and (code == "ATT104" or not followed))
    return Verdict(code, Severity.WARNING if weak else Severity.ERROR, effective, expected, cause)


def _varies(factor: float, design: Design) -> bool:
    return design.position is not None and factor > 1.0


def _likely(
    effective: float, design: Design, applied: Applied, head_dim: int, certain: bool, widths: set[int]
) -> tuple[str, str]:
    """The first known mistake that explains the effective scale, to within what a measured factor allows."""
    for code, value, cause in _mistakes(design, applied, head_dim, certain, widths):
        if math.isclose(effective, value, rel_tol=MEASURED):
            return code, cause
    expected = design.value or math.nan
    return "ATT104", f"it is {effective / expected:.4g} times what it should be"


def _mistakes(
    design: Design, applied: Applied, head_dim: int, certain: bool, widths: set[int]
) -> Iterator[tuple[str, float, str]]:
    """Known mistakes: code, the effective scale each would give, and words. Their order settles coincidences."""
    base, usual = design.base or math.nan, head_dim**-0.5
    value = design.value or math.nan
    if _scales_in_two_places(applied, design):  # evidence for this mistake that goes before any coincidence of numbers
        for again in (base, usual):
            yield "ATT102", value * again, "the scale is applied twice, once to q or k and once by the call"
    yield from _mistaken_factors(design, value)
    if not math.isclose(base, 1.0):
        yield "ATT101", 1.0, "no scale is applied"
        yield "ATT101", value / base, f"only the {' and the '.join(f.name for f in design.factors)} is applied, no scale beside"
    for width in sorted(widths - {head_dim}):
        for others in (value / base, 1.0):
            cause = f"it is 1/sqrt({width}), the width of the model, where the width of a head ({head_dim}) belongs"
            yield "ATT103", others * width**-0.5, cause
    if design.folded:
        yield "ATT102", usual, "the scale is applied twice: these weights were initialised with 1/sqrt(d_head) inside"
    if not math.isclose(base, usual, rel_tol=MEASURED):
        for others in (value / base, 1.0):
            ignored = f"flag ignored: {design.setting} of the config; " if design.setting else ""
            cause = f"{ignored}the usual 1/sqrt(d_head) is applied and the rule of the architecture ignored"
            yield "ATT104", others * usual, cause
    if certain and not math.isclose(base, 1.0):
        for again in (base, usual):
            yield "ATT102", value * again, "the scale is applied twice"
    for factor in design.off:
        cause = f"flag ignored: the config switches {factor.flag} off; the factor {factor.name} = {factor.value:.5g} is applied"
        yield "ATT104", value * factor.value, cause
    yield "ATT104", 1 / head_dim, "it is 1/d_head, the rule of muP, or 1/sqrt(d_head) applied twice"
    yield "ATT104", 1 / value, "q·k is divided by the scale instead of multiplied"
    yield "ATT104", head_dim**0.5, "q·k is multiplied by sqrt(d_head) instead of divided"


def _mistaken_factors(design: Design, value: float) -> Iterator[tuple[str, float, str]]:
    """What may go wrong with the factors beside the base."""
    for factor in design.factors:
        ignored = f"flag ignored: {factor.flag} of the config; " if factor.flag else ""
        yield "ATT104", value / factor.value, f"{ignored}the factor {factor.name} = {factor.value:.5g} is missing"
        if factor.root:
            root = math.sqrt(factor.value)
            yield "ATT104", value / root, f"{factor.root} = {root:.5g} is applied once instead of twice"
        yield "ATT104", value * factor.value, f"the factor {factor.name} = {factor.value:.5g} is applied twice"


def _scales_in_two_places(applied: Applied, design: Design) -> bool:
    """Whether the call scales and q or k arrive scaled, and one of the two is not the architecture's own doing."""
    if applied.query is None or applied.key is None:
        return False
    carried, own = applied.query * applied.key, design.query * design.key
    passed, own_passed = applied.passed, (design.value or math.nan) / own
    if math.isclose(carried, 1.0, rel_tol=MEASURED) or math.isclose(passed, 1.0, rel_tol=MEASURED):
        return False
    return not (math.isclose(carried, own, rel_tol=MEASURED) and math.isclose(passed, own_passed, rel_tol=MEASURED))


def _small_difference(effective: float, expected: float) -> str:
    for dtype in (torch.bfloat16, torch.float16):
        rounded = torch.tensor(expected, dtype=dtype).item()
        if math.isclose(effective, rounded, rel_tol=EXACT):
            return f"it was rounded to {str(dtype).removeprefix('torch.')}"
    return f"it differs by {abs(effective / expected - 1):.2%}"
