"""The scale rules ATT101 to ATT104: the scale that each call really applies against the one that its architecture calls for.

`measure_call` runs inside the forward pass and keeps numbers and small tensors only; `scale_findings` reads them afterwards.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attemper.capture.projections import Origin
from attemper.capture.record import AttentionCall
from attemper.checker.codes import RULES
from attemper.checker.evidence import CallEvidence, Evidence
from attemper.checker.scale_rules import setting
from attemper.checker.scale_verdict import Applied, Verdict, effective_scale, judge
from attemper.checker.scales_expected import ExpectedScale, expected_scale, modules_around
from attemper.checker.thresholds import Thresholds
from attemper.report import Finding, Severity

_REMEDIES = {rule.code: rule.remedy for rule in RULES}


@dataclass(frozen=True)
class Operand:
    """What became of q or k since its projection: the same two fields as `attemper.capture.projections.Origin`.

    Attributes:
        factor: the constant factor since the projection (since the norm, where one ran); None where none was found.
        change: "unchanged", "scaled", "normalised" or "unknown".
    """

    factor: float | None = 1.0
    change: str = "unchanged"


@dataclass(frozen=True)
class Scaling:
    """How one call scales q·k.

    Attributes:
        head_dim: width of q and k; heads: number of query heads.
        scale: the factor that the call applies: a number, or a tensor where it differs by head or position.
        query, key: what became of q and k before; None where they were not followed. Reading them may wait for the device.
    """

    head_dim: int
    heads: int
    scale: float | Tensor
    query: Operand | Origin | None = Operand()
    key: Operand | Origin | None = Operand()


def measure_call(call: AttentionCall) -> Scaling:
    """What the scale rules need of one call; nothing of the size of q or k, and no transfer to the host."""
    scale = call.scale.detach().clone() if isinstance(call.scale, Tensor) else call.scale
    return Scaling(call.query.shape[-1], call.query.shape[-3], scale, call.query_origin, call.key_origin)


def scale_findings(evidence: Evidence) -> tuple[Finding, ...]:
    """The findings ATT101 to ATT104; a module that is called several times with one fault gives one finding."""
    findings: dict[tuple[str, str, str], Finding] = {}
    for call in evidence.calls:
        if not isinstance(call.scaling, Scaling):
            continue
        for finding in _call_findings(evidence, call, call.scaling):
            findings.setdefault((finding.module, finding.code, finding.message), finding)
    return tuple(findings.values())


def effective(model: nn.Module, config: Any, call: CallEvidence) -> float | None:
    """The factor from the projections' q·k to the logits of one call; None where it differs by head or position."""
    if not isinstance(call.scaling, Scaling):
        return None
    scales = _by_head(call.scaling)
    if scales is None or len(scales) != 1:
        return None
    expected = _expected(model, config, call.module, call.scaling)
    return effective_scale(_applied(call.scaling, scales[0]), expected.design)


def judged(
    model: nn.Module, config: Any, module: str, scaling: Scaling, limits: Thresholds
) -> Iterator[tuple[ExpectedScale, Verdict, tuple[int, ...]]]:
    """What deviates from the architecture's rule in one call: the rule, the verdict, and its heads (() for all of them)."""
    expected = _expected(model, config, module, scaling)
    scales = _by_head(scaling)
    if scales is None or (len(scales) > 1 and not expected.certain):
        return  # learned, or by position: there is nothing to hold it against
    widths = _model_widths(model, config, module, scaling)
    verdicts: dict[Verdict, list[int]] = {}
    for head, scale in enumerate(scales):
        verdict = judge(
            _applied(scaling, scale),
            expected.design,
            scaling.head_dim,
            certain=expected.certain,
            widths=widths,
            limits=limits,
        )
        if verdict is not None:
            verdicts.setdefault(verdict, []).append(head)
    for verdict, heads in verdicts.items():
        yield expected, verdict, tuple(heads) if len(scales) > 1 else ()


def _call_findings(evidence: Evidence, call: CallEvidence, scaling: Scaling) -> Iterator[Finding]:
    for expected, verdict, heads in judged(evidence.model, evidence.config, call.module, scaling, evidence.thresholds):
        yield _finding(call, scaling, expected, verdict, heads)


def _finding(call: CallEvidence, scaling: Scaling, expected: ExpectedScale, verdict: Verdict, heads: tuple[int, ...]) -> Finding:
    name = f"{expected.architecture} calls for" if expected.certain else "the usual rule is"
    doubts = []
    if not expected.certain:
        doubts.append("the architecture is not in the table, so 1/sqrt(d_head) is assumed")
    hidden = [
        letter for letter, operand in (("q", scaling.query), ("k", scaling.key)) if not operand or operand.change == "unknown"
    ]
    if hidden:
        doubts.append(
            f"{' and '.join(hidden)} could not be followed to the projection, so a factor hidden there would not be seen"
        )
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


def _applied(scaling: Scaling, scale: float) -> Applied:
    query, key = scaling.query or Operand(None, "unknown"), scaling.key or Operand(None, "unknown")
    return Applied(scale, _factor(query), _factor(key), query.change == "normalised", key.change == "normalised")


def _factor(operand: Operand | Origin) -> float | None:
    return 1.0 if operand.change == "unchanged" else operand.factor


def _by_head(scaling: Scaling) -> tuple[float, ...] | None:
    """One scale for all heads, or one for each; None where it depends on the position or the example."""
    if not isinstance(scaling.scale, Tensor):
        return (float(scaling.scale),)
    scale = scaling.scale.double().cpu()
    if bool((scale == scale.flatten()[0]).all()):
        return (scale.flatten()[0].item(),)
    if scale.dim() == 1:
        return tuple(scale.tolist())
    first = scale.flatten(0, -3)[0, :, 0] if scale.dim() >= 3 and scale.shape[-2] == scaling.heads else None
    if first is not None and torch.equal(scale, first[:, None].expand_as(scale)):
        return tuple(first.tolist())
    return None


def _model_widths(model: nn.Module, config: Any, module: str, scaling: Scaling) -> Iterable[int]:
    """Widths that might have been taken for the head's: of the config, of all heads together, of what the projections read."""
    inner = modules_around(model, module)[0]
    names = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim")
    sizes = {setting(owner, name) for owner in (getattr(inner, "config", None), config) for name in names}
    sizes |= {child.in_features for child in inner.children() if isinstance(child, nn.Linear)}
    return {scaling.heads * scaling.head_dim} | {size for size in sizes if isinstance(size, int) and size > 0}
