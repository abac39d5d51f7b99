"""The scale rules ATT101 to ATT104: the scale that each call really applies against the one that its architecture calls for."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from attemper.checker.codes import RULES
from attemper.checker.evidence import CallEvidence, Evidence, Misread
from attemper.checker.scale_config import setting
from attemper.checker.scale_curve import judge_curve, shows
from attemper.checker.scale_measured import Scaling, applied, by_head, effective_curve
from attemper.checker.scale_verdict import Verdict, effective_scale, judge
from attemper.checker.scales_expected import ExpectedScale, expected_scale, modules_around
from attemper.checker.thresholds import Thresholds
from attemper.report import Finding, ScaleRange, Severity

_REMEDIES = {rule.code: rule.remedy for rule in RULES}


def scale_findings(evidence: Evidence) -> tuple[Finding, ...]:
    """The findings ATT101 to ATT104; a module that is called several times with one fault gives one finding."""
    findings: dict[tuple[str, str, str], Finding] = {}
    for call in (*evidence.calls, *evidence.misread):
        if not isinstance(call.scaling, Scaling):
            continue
        for finding in _call_findings(evidence, call, call.scaling):
            findings.setdefault((finding.module, finding.code, finding.message), finding)
    return tuple(findings.values())


def effective(model: nn.Module, config: Any, call: CallEvidence) -> ScaleRange | None:
    """The factor from the projections' q·k to the logits of one call, by head or position; None where that is not known."""
    if not isinstance(call.scaling, Scaling):
        return None
    design = _expected(model, config, call.module, call.scaling).design
    scaling = call.scaling.part(1) if design.turned and call.scaling.has_parts else call.scaling
    scales = by_head(scaling.scale, scaling.heads)
    if scales is not None and not (scaling.query and scaling.query.curve is not None):
        return ScaleRange(tuple(effective_scale(applied(scaling, scale), design) for scale in scales))
    curve = effective_curve(scaling, design)
    if curve is None:
        return None
    return ScaleRange((float(curve.min()), float(curve.max())), by_position=True)


def judged(
    model: nn.Module, config: Any, module: str, scaling: Scaling, limits: Thresholds
) -> Iterator[tuple[ExpectedScale, Verdict, tuple[int, ...]]]:
    """What deviates from the architecture's rule in one call: the rule, the verdict, and its heads (() for all of them)."""
    expected = _expected(model, config, module, scaling)
    design = expected.design
    widths = _model_widths(model, config, module, scaling)
    if expected.certain:
        curved, verdicts = judge_curve(scaling, design, widths, limits)
        if curved:
            yield from ((expected, *each) for each in verdicts)
            return
    scales = by_head(scaling.scale, scaling.heads)
    if scales is None or (len(scales) > 1 and not expected.certain):
        return  # learned, or by position: there is nothing to hold it against
    found: dict[Verdict, list[int]] = {}
    for head, scale in enumerate(scales):
        verdict = _of_head(scaling, scale, expected, widths, limits)
        if verdict is not None:
            found.setdefault(verdict, []).append(head)
    for verdict, heads in found.items():
        yield expected, verdict, tuple(heads) if len(scales) > 1 else ()


def learned_notes(evidence: Evidence) -> list[str]:
    """Calls whose scale is trained: which range it has, since there is nothing to hold it against."""
    ranges = []
    for call in evidence.calls:
        if isinstance(call.scaling, Scaling):
            expected = _expected(evidence.model, evidence.config, call.module, call.scaling)
            scales = effective(evidence.model, evidence.config, call) if expected.certain and expected.value is None else None
            if scales is not None:
                ranges.append((call.module, scales.values))
    if not ranges:
        return []
    values = [value for _, each in ranges for value in each]
    span = f"from {min(values):.5g} to {max(values):.5g}"
    where = f"{len(ranges)} calls, such as {ranges[0][0]}"
    return [f"the scale of {where}, is learned, {span}: there is no rule to hold it against"]


def position_notes(evidence: Evidence) -> list[str]:
    """Calls whose rule has a factor by position that this run could not show."""
    short, hidden = [], []
    for call in evidence.calls:
        if not isinstance(call.scaling, Scaling):
            continue
        design = _expected(evidence.model, evidence.config, call.module, call.scaling).design
        if design.position is None or not design.value:
            continue
        if not shows(design, call.scaling, evidence.thresholds):
            short.append((call.module, f"{design.position.name} is 1 at all {call.queries} positions of these inputs"))
        elif "q" in call.scaling.hidden:
            hidden.append((call.module, f"{design.position.name} is on q, which could not be followed to its projection"))
    return [
        f"whether {len(calls)} calls, such as {calls[0][0]}, apply their factor by position was not seen: the {calls[0][1]}"
        for calls in (short, hidden)
        if calls
    ]


def _of_head(
    scaling: Scaling, scale: float, expected: ExpectedScale, widths: Iterable[int], limits: Thresholds
) -> Verdict | None:
    design, certain = expected.design, expected.certain
    if design.turned is None or not scaling.has_parts:
        return judge(applied(scaling, scale), design, scaling.head_dim, certain=certain, widths=widths, limits=limits)
    rest = applied(scaling.part(1), scale)
    verdict = judge(rest, design, scaling.head_dim, certain=certain, widths=widths, limits=limits)
    if verdict is not None:
        return verdict
    root = math.sqrt(design.turned.value)
    turned = replace(design, factors=(*design.factors, design.turned), query=design.query * root, key=design.key * root)
    verdict = judge(applied(scaling.part(0), scale), turned, scaling.head_dim, certain=certain, widths=widths, limits=limits)
    return verdict and replace(verdict, cause=f"{verdict.cause}, in the part of the width that RoPE turns")


def _call_findings(evidence: Evidence, call: CallEvidence | Misread, scaling: Scaling) -> Iterator[Finding]:
    for expected, verdict, heads in judged(evidence.model, evidence.config, call.module, scaling, evidence.thresholds):
        yield _finding(call, scaling, expected, verdict, heads)


def _finding(
    call: CallEvidence | Misread, scaling: Scaling, expected: ExpectedScale, verdict: Verdict, heads: tuple[int, ...]
) -> Finding:
    name = f"{expected.architecture} calls for" if expected.certain else "the usual rule is"
    doubts = []
    if not expected.certain:
        doubts.append("the architecture is not in the table, so 1/sqrt(d_head) is assumed")
    if scaling.hidden and not (expected.design.turned and scaling.has_parts):
        words = f"{' and '.join(scaling.hidden)} could not be followed to the projection"
        doubts.append(f"{words}, so a factor hidden there would not be seen")
    if isinstance(call, Misread):
        doubts.append("the scale is that of a regression of its logits on q·k, since its own code was not understood")
    message = (
        f"q·k is multiplied by {verdict.effective:.5g}; {name} {expected.rule} = {verdict.expected:.5g} "
        f"(d_head {scaling.head_dim}): {verdict.cause}."
    )
    if doubts:
        message += f" Less certain: {'; '.join(doubts)}."
    return Finding(
        code=verdict.code,
        severity=verdict.severity,
        module=call.module,
        call=call.call,
        heads=heads,
        measured=verdict.effective,
        threshold=verdict.expected,
        message=message,
        source=expected.source,
        cost=_cost(verdict),
        remedy=_REMEDIES[verdict.code],
    )


def _cost(verdict: Verdict) -> str:
    if verdict.severity is Severity.INFO:
        return f"The standard deviation of the logits changes by the factor {verdict.ratio:.5g}: next to nothing."
    effect = "heads saturate and 16-bit range is lost" if abs(verdict.ratio) > 1 else "attention is nearer to uniform"
    return f"The standard deviation of the logits is {verdict.ratio:.4g} times what the rule gives: {effect}."


def _expected(model: nn.Module, config: Any, module: str, scaling: Scaling) -> ExpectedScale:
    return expected_scale(model, module, config, head_dim=scaling.head_dim, heads=scaling.heads)


def _model_widths(model: nn.Module, config: Any, module: str, scaling: Scaling) -> Iterable[int]:
    """Widths that might have been taken for the head's: of the config, of all heads together, of what the projections read."""
    inner = modules_around(model, module)[0]
    names = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim")
    sizes = {setting(owner, name) for owner in (getattr(inner, "config", None), config) for name in names}
    sizes |= {child.in_features for child in inner.children() if isinstance(child, nn.Linear)}
    return {scaling.heads * scaling.head_dim} | {size for size in sizes if isinstance(size, int) and size > 0}
