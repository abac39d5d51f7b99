"""The remedies, done to the module in memory: clip what the check measured, fold one scale rule into another."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from attemper.checker.evidence import Evidence
from attemper.checker.remedies.records import Picks
from attemper.errors import ArgumentError, UnsupportedError
from attemper.report import Report
from attemper.scales import Constant, Inverse, InverseSqrt, LogitShape, Scale
from attemper.weights import Clip, Edit, find_projections, fold_scale, qk_clip_

_RULES = {"none": Constant(1.0), "inverse-sqrt": InverseSqrt(), "inverse": Inverse()}
# Settings by which a configuration says the scale.
DIALS = ("attention_multiplier", "query_pre_attn_scalar")
_ROUNDS = 5  # of clipping and measuring
_SAME = 1e-3  # a scale that was stored in 16 bits is the same scale


@dataclass(frozen=True)
class Edited:
    """Attributes: clips and edits: what was done; settings: of config.json, (name, before, after); notes: what to know."""

    clips: tuple[Clip, ...] = ()
    edits: tuple[Edit, ...] = ()
    settings: tuple[tuple[str, Any, Any], ...] = ()
    notes: tuple[str, ...] = ()


def apply(
    picks: Picks, model: nn.Module, evidence: Evidence, report: Report, margin: float, again: Callable[[], Evidence]
) -> tuple[Edited, dict[str, Tensor]]:
    """Do what was picked to the model, in place.

    Args:
        model: with the weights of the one that `evidence` and `report` are about.
        margin: by how much, relatively, a clipped head is to stay under the threshold, so that rounding does not lift it over.
        again: measures the model as it is now.

    Returns:
        What was done, and the parameters that were edited, as they were before.

    Raises:
        ArgumentError, UnsupportedError: as `qk_clip_` and `fold_scale` raise, or neither of two rules is the model's.
    """
    maxima = {} if picks.clip is None else _over(_largest(evidence), picks.clip)
    old: dict[str, Tensor] = {}
    done = Edited()
    for _ in range(_ROUNDS if picks.clip is not None else 0):
        if not maxima or picks.clip is None:
            break
        old = _projections(model, set(maxima)) | old
        clipped = qk_clip_(model, maxima, picks.clip * (1 - margin))
        done = replace(done, clips=_merged(done.clips, clipped.clips), edits=(*done.edits, *clipped.edits))
        maxima = _over(_largest(again()), picks.clip)  # layers behind a clipped one see other inputs now
    if picks.fold is not None:
        old = _projections(model, None) | old
        folded = _fold(picks.fold, model, evidence, report)
        done = replace(folded, clips=done.clips, edits=(*done.edits, *folded.edits))
    names = {edit.parameter for edit in done.edits}
    return done, {name: value for name, value in old.items() if name in names}


def rule(text: str) -> Scale:
    """The rule of that name, or of that number.

    Raises:
        ArgumentError: neither.
    """
    known = _RULES.get(text.strip().lower())
    if known is not None:
        return known
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number == 0:
        raise ArgumentError(
            "fold", repr(text), f"{', '.join(_RULES)} or a finite number other than 0, on both sides of the colon"
        )
    return Constant(number)


def _largest(evidence: Evidence) -> dict[str, Tensor]:
    """The largest |scale · product| of each head, over all calls of a module; where the scale varies, with the largest of it."""
    found: dict[str, Tensor] = {}
    for call in evidence.calls:
        scale = call.scale
        if isinstance(scale, Tensor):
            scale = scale.double().abs()
            by_head = scale if scale.ndim == 1 else scale.flatten(0, -3).amax(0) if scale.ndim > 2 else scale
            scale = by_head.amax(-1) if by_head.ndim > 1 else by_head
            scale = scale.reshape(-1) if scale.numel() in (1, call.heads) else scale.amax()
        largest = call.stats.product_absmax.double().cpu() * (scale if isinstance(scale, Tensor) else abs(scale))
        found[call.module] = torch.maximum(found[call.module], largest) if call.module in found else largest
    return found


def _over(maxima: dict[str, Tensor], threshold: float) -> dict[str, Tensor]:
    """Only what is to be clipped, so that the layout of other modules need not be known. NaN stays, for `qk_clip_` to refuse."""
    over = {name: torch.where(values <= threshold, 0.0, values) for name, values in maxima.items()}
    return {name: values for name, values in over.items() if bool((values != 0).any())}


def _merged(first: tuple[Clip, ...], second: tuple[Clip, ...]) -> tuple[Clip, ...]:
    """One record for heads that were clipped again: their first maximum, and both factors."""
    found = {(clip.module, clip.heads, clip.on): clip for clip in first}
    for clip in second:
        earlier = found.get((clip.module, clip.heads, clip.on))
        found[clip.module, clip.heads, clip.on] = (
            clip if earlier is None else replace(earlier, factor=earlier.factor * clip.factor)
        )
    return tuple(found.values())


def _projections(model: nn.Module, only: set[str] | None) -> dict[str, Tensor]:
    """Copies of the parameters that may be edited."""
    names = [
        f"{module}.{name}" if module else name
        for module, projections in find_projections(model, only=only).items()
        for heads in (projections.query, projections.key)
        if heads is not None
        for name in heads.parameters
    ]
    return {name: model.get_parameter(name).detach().clone() for name in dict.fromkeys(names)}


def _fold(fold: tuple[str, str], model: nn.Module, evidence: Evidence, report: Report) -> Edited:
    from_rule, to_rule = (rule(text) for text in fold)
    names = find_projections(model)
    widths = {names[call.module].head_dim for call in evidence.calls if call.module in names}
    applied = [row.scale for row in report.rows if row.module in names]
    if not applied or None in applied or len(widths) != 1:
        raise UnsupportedError(
            "fold: the model's own scale differs by layer, head or position, or could not be measured; "
            "fold from Python: attemper.weights.fold_scale"
        )
    source, target = (float(each.factor(LogitShape(next(iter(widths)), 1, 1, 1))) for each in (from_rule, to_rule))
    runs_target = all(math.isclose(scale, target, rel_tol=_SAME) for scale in applied if scale is not None)
    runs_source = all(math.isclose(scale, source, rel_tol=_SAME) for scale in applied if scale is not None)
    if not runs_target and not runs_source:
        shown = ", ".join(sorted({f"{scale:.6g}" for scale in applied}))
        raise ArgumentError(
            "fold", f"{fold[0]}:{fold[1]} ({source:.6g} to {target:.6g})", f"one of the two to be what the model applies, {shown}"
        )
    edits = fold_scale(model, from_rule, to_rule).edits
    if runs_target:
        return Edited(edits=edits)
    settings = _dials(model, target)
    note = (
        f"transformers takes the scale from {settings[0][0]}, which was set: it computes what it computed before"
        if settings
        else f"these weights are for an engine that applies {target:.6g}; transformers' own code still applies {source:.6g}, "
        "so its outputs and the check after the edit are those of another function"
    )
    return Edited(edits=edits, settings=settings, notes=(note,))


def _dials(model: nn.Module, scale: float) -> tuple[tuple[str, Any, Any], ...]:
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return tuple(
        (name, getattr(config, name), _dialled(name, scale)) for name in DIALS if getattr(config, name, None) is not None
    )


def _dialled(name: str, scale: float) -> float | int:
    if name == "attention_multiplier":
        return scale
    whole = round(scale**-2)  # transformers takes no fraction there
    if whole < 1 or not math.isclose(whole**-0.5, scale, rel_tol=1e-6):
        raise ArgumentError("fold", f"{scale:.8g} as the new scale", f"1/sqrt(n) of a whole n, which is what {name} can say")
    return whole
