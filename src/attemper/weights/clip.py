"""`qk_clip_`: holds the largest scale·product of every head at or under a threshold, by its weights."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from attemper.errors import ArgumentError, UnsupportedError
from attemper.weights.edit import Edit, Edits
from attemper.weights.families import find_named
from attemper.weights.layout import Projections

Operand = Literal["auto", "query", "both"]


@dataclass(frozen=True)
class Clip:
    """Heads that were clipped together.

    Attributes:
        module: name of the attention module. heads: numbers of the query heads, more than one where they share a key or a gain.
        maximum: the largest |scale·product| among them, as given. factor: γ, by which their products were multiplied.
        on: "query" where γ is on q alone, "both" where √γ is on q and on k.
    """

    module: str
    heads: tuple[int, ...]
    maximum: float
    factor: float
    on: str


@dataclass(frozen=True)
class ClipReport:
    """What `qk_clip_` did.

    Attributes:
        clips: one for every head, or group of heads, over the threshold. edits: one for each parameter that was multiplied.
    """

    clips: tuple[Clip, ...]
    edits: tuple[Edit, ...]

    def __str__(self) -> str:
        if not self.clips:
            return "nothing to clip: no head is over the threshold"
        heads = sum(len(clip.heads) for clip in self.clips)
        modules = len({clip.module for clip in self.clips})
        return f"{heads} heads clipped in {modules} attention modules, by {min(clip.factor for clip in self.clips):.4g} at most"


def qk_clip_(
    model: nn.Module,
    max_logits: Mapping[str, Tensor],
    threshold: float = 100.0,
    *,
    on: Operand = "auto",
    layouts: Mapping[str, Projections] | None = None,
) -> ClipReport:
    """Multiply the products of each head over the threshold by γ = threshold / max, in place, through its weights.

    Separate and fused projections, with their biases: W_q ← √γ·W_q and W_k ← √γ·W_k of the head. Fewer key heads than query
    heads: γ on W_q alone, each head by its own maximum, or (`on="both"`) √γ on both by the largest maximum of the group that
    shares a key head. MLA: √γ on the parts of q and k without position, γ on q's rotary part, nothing on the rotary key,
    which all heads share. Norms on q and k: their gains instead of the projections; a gain that all heads share is clipped
    by the largest maximum of the layer. What is not over the threshold keeps its bits. The products of a clipped head
    become γ times what they were, at these inputs and at all others.

    Weights may be sharded (DTensor: `fully_shard`, tensor parallelism): heads are counted over the whole model, and every
    process that holds a shard makes the same call with the same maxima.

    Args:
        model: any module whose attention is in the table of families, or described in layouts.
        max_logits: for each attention module, by name, the largest |scale·product| of each query head, before softcap, bias and
            mask: a tensor [heads]. Modules that are not named are left alone.
        threshold: what no head should exceed, above 0.
        on: "both": √γ on q and on k. "query": γ on q alone. "auto": both where each query head has a key head or gain of its own
            (or all heads share one gain of q and one of k), q alone otherwise.
        layouts: see `find_projections`; where each step clips, pass `layouts=find_projections(model)`, made once.

    Returns:
        Which heads were clipped and by what.

    Raises:
        ArgumentError: threshold is not above 0, a maximum is NaN or infinite, a tensor is not [heads], a name is no attention
            module. UnsupportedError: a layout is unknown, a projection computes more than W·x + b (an adapter), or on="both"
            where k cannot be scaled alone. Nothing was changed then.

    Source: Kimi Team 2025 (Kimi K2, arXiv 2507.20534), section 2.1, with threshold 100; there each step of MuonClip clips so.
    """
    check_threshold(threshold)
    if on not in ("auto", "query", "both"):
        raise ArgumentError("on", repr(on), '"auto", "query" or "both"')
    if not isinstance(max_logits, Mapping):
        raise ArgumentError("max_logits", type(max_logits).__name__, "a dict of module names and tensors [heads]")
    found = find_named("max_logits", model, layouts, set(max_logits))
    edits, clips = Edits(model), []
    for name, projections in found.items():
        maxima = _maxima(name, max_logits[name], projections)
        where = _on(name, on, projections)
        factors, units = _factors(maxima, float(threshold), projections, where)
        for unit, factor in enumerate(factors.tolist()):
            if factor < 1.0:
                heads = tuple(head for head in range(projections.heads) if units[head] == unit)
                clips.append(Clip(name, heads, float(maxima[list(heads)].max()), factor, where))
        _scale(edits, name, projections, factors, where)
    return ClipReport(tuple(clips), edits.write())


def check_threshold(threshold: object) -> None:
    """Raise what `qk_clip_` would raise of this threshold.

    Raises:
        ArgumentError: it is no finite number above 0.
    """
    if not isinstance(threshold, int | float) or not math.isfinite(threshold) or threshold <= 0:
        raise ArgumentError("threshold", repr(threshold), "a finite number above 0, such as 100.0")


def check_clip(model: nn.Module, layouts: Mapping[str, Projections], on: Operand) -> None:
    """Raise what `qk_clip_` would raise of these modules, whatever their maxima; nothing is changed.

    Raises:
        UnsupportedError, ArgumentError: as `qk_clip_`: on="both" where k cannot be scaled alone; a parameter is missing,
            reparametrised, quantised, of a projection with an adapter, or also held by a module that is not among these.
    """
    edits = Edits(model)
    for name, projections in layouts.items():
        where = _on(name, on, projections)
        maxima = torch.zeros(projections.heads, dtype=torch.float64)
        maxima[0] = 4.0
        _scale(edits, name, projections, _factors(maxima, 1.0, projections, where)[0], where)
    edits.checked()


def clipped_parameters(name: str, projections: Projections, on: Operand) -> tuple[str, ...]:
    """Names in the model of the parameters that clipping this module may change."""
    both = _on(name, on, projections) == "both" and projections.key is not None
    parts = (projections.query, projections.key) if both else (projections.query,)
    inside = (parameter for part in parts if part is not None for parameter in part.parameters)
    return tuple(f"{name}.{parameter}" if name else parameter for parameter in inside)


def _maxima(name: str, given: Tensor, projections: Projections) -> Tensor:
    """float64 [heads], on the CPU."""
    if not isinstance(given, Tensor) or given.shape != (projections.heads,):
        shape = list(given.shape) if isinstance(given, Tensor) else type(given).__name__
        raise ArgumentError(f"max_logits[{name!r}]", shape, f"a tensor [heads] with {projections.heads} heads")
    maxima = given.detach().to("cpu", torch.float64)
    if not bool(maxima.isfinite().all()):
        raise ArgumentError(f"max_logits[{name!r}]", maxima.tolist(), "finite numbers: what overflowed cannot be clipped back")
    return maxima


def _on(name: str, on: Operand, projections: Projections) -> str:
    if on == "both" and projections.key is None:
        raise UnsupportedError(f'{name}: k cannot be scaled alone (values or other layers are made of it): pass on="query"')
    if on != "auto":
        return on
    return "both" if projections.key is not None and projections.key.count == projections.query.count else "query"


def _factors(maxima: Tensor, threshold: float, projections: Projections, on: str) -> tuple[Tensor, list[int]]:
    """γ of each unit of heads that are clipped together, float64 [units], and the unit of each head."""
    count = projections.query.count
    if on == "both" and projections.key is not None:
        count = min(count, projections.key.count)
    largest = maxima.view(count, -1).amax(1)
    # Divided only where it is over: a maximum of 0 or below is under every threshold.
    factors = torch.where(largest > threshold, threshold / largest.clamp_min(threshold), 1.0)
    return factors, [head * count // projections.heads for head in range(projections.heads)]


def _scale(edits: Edits, name: str, projections: Projections, factors: Tensor, on: str) -> None:
    query, key = projections.query, projections.key
    of_query = factors.repeat_interleave(query.count // len(factors))
    if on == "query" or key is None:
        edits.scale(name, query, of_query)
        return
    spread = of_query.sqrt()[:, None].repeat(1, projections.head_dim)
    if projections.shared_key:
        spread[:, -projections.shared_key :] = of_query[:, None]
    edits.scale(name, query, spread)
    edits.scale(name, key, factors.sqrt().repeat_interleave(key.count // len(factors)))
