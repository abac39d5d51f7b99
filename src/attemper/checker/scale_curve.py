"""Holds a factor by position (Llama 4's temperature, YaRN's relatives) against the curve that the architecture's rule gives.

What must hold: a factor that these positions cannot show is never called missing; nothing is said where the sequences of a batch
have curves of their own, since their positions are then not known.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from attemper.checker.scale_measured import Scaling, effective_curve
from attemper.checker.scale_positions import ByPosition
from attemper.checker.scale_rules import Design
from attemper.checker.scale_verdict import Applied, Verdict, judge
from attemper.checker.thresholds import Thresholds
from attemper.report import Severity

_ROOM = 4  # a factor measured by norms is known to a few times the tolerance of its measurement


def shows(design: Design, scaling: Scaling, limits: Thresholds) -> bool:
    """Whether the rule's factor by position differs from a constant at these positions by more than can be overlooked."""
    if design.position is None:
        return False
    curve = design.position.curve(scaling.queries, scaling.first)
    return float((curve - 1).abs().max()) > _seen(scaling, limits)


def judge_curve(
    scaling: Scaling, design: Design, widths: Iterable[int], limits: Thresholds
) -> tuple[bool, tuple[tuple[Verdict, tuple[int, ...]], ...]]:
    """Whether a curve was there to judge, and the verdicts with the heads that they are about (() for all).

    Only for architectures whose rule is known. widths: as in `scale_verdict.judge`.
    """
    curve = effective_curve(scaling, design)
    value = design.value
    if curve is None or not value or not bool(torch.isfinite(curve).all()):
        return False, ()
    varies = float((curve / curve[..., :1] - 1).abs().max()) > _seen(scaling, limits)
    if not varies and not shows(design, scaling, limits):
        return False, ()
    found: dict[Verdict, list[int]] = {}
    for head in range(curve.shape[1]):
        verdict = _of_head(curve[:, head], design, scaling, widths, limits)
        if verdict is not None:
            found.setdefault(verdict, []).append(head)
    return True, tuple((verdict, tuple(heads) if curve.shape[1] > 1 else ()) for verdict, heads in found.items())


def _seen(scaling: Scaling, limits: Thresholds) -> float:
    tolerances = (each.tolerance for each in (scaling.query, scaling.key) if each)
    return max(limits.scale_exact, _ROOM * max(tolerances, default=0.0))


def _of_head(curve: Tensor, design: Design, scaling: Scaling, widths: Iterable[int], limits: Thresholds) -> Verdict | None:
    """curve: [rows, positions]."""
    value, rule, seen = design.value or 1.0, design.position, _seen(scaling, limits)
    wanted = torch.ones_like(curve[0]) if rule is None else rule.curve(scaling.queries, scaling.first)
    ratio = curve / (value * wanted)
    if bool(((ratio - 1).abs() <= seen).all()):
        return None
    for constant in (ratio, curve / value):  # the curve is right, or there is none: then a constant may be wrong
        if float((constant / constant.flatten()[0] - 1).abs().max()) <= seen:
            plain = replace(design, query=1.0, key=1.0, position=None)
            passed = Applied(value * float(constant.mean()), fitted=True)
            verdict = judge(passed, plain, scaling.head_dim, widths=widths, limits=limits)
            if verdict is not None or constant is ratio:
                return verdict
    if bool(((curve - curve[:1]).abs() > seen * curve[:1].abs()).any()):
        return None
    if rule is None:
        passed_so = isinstance(scaling.scale, Tensor) and scaling.scale.dim() > 1
        if not passed_so and len(curve) < 2:
            return None  # one sequence: a norm over all heads would look the same
        words = f"it differs by position, from {float(curve.min()):.5g} to {float(curve.max()):.5g}, and the rule does not"
        worst = int((ratio[0] - 1).abs().argmax())
        return Verdict("ATT104", Severity.WARNING, float(curve[0, worst]), value, words)
    at = int((ratio[0] - 1).abs().argmax())
    mistakes = _mistakes(rule, value, scaling)
    known = next((words for other, words in mistakes if bool(((curve[0] / other - 1).abs() <= seen).all())), None)
    if known is None and bool(((ratio - 1).abs() <= limits.scale_measured).all()):
        return None
    words = known or f"its factor by position, the {rule.name}, is another one"
    place = f"at position {scaling.first + at} that is {float(ratio[0, at]):.4g} times what it should be"
    return Verdict("ATT104", Severity.ERROR, float(curve[0, at]), value * float(wanted[at]), f"{words} ({place})")


def _mistakes(rule: ByPosition, value: float, scaling: Scaling) -> Iterator[tuple[Tensor, str]]:
    """Curves that known mistakes give, and words."""
    wanted = rule.curve(scaling.queries, scaling.first)
    yield torch.full_like(wanted, value), f"position factor missing: the {rule.name} is not applied"
    yield value * wanted.square(), f"the {rule.name} is applied twice"
    yield value / wanted, f"the {rule.name} divides instead of multiplying"
    yield value * rule.curve(scaling.queries, scaling.first + 1), f"the {rule.name} is taken one position too late"
    yield value * torch.cat([wanted[:1], wanted[:-1]]), f"the {rule.name} is taken one position too early"
