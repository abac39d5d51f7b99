"""How one call scales q·k, as measured: the factor that it applies itself, and those on q and k since their projections.

`measure_call` runs inside the forward pass and keeps numbers and small tensors only; the rest is read once the pass has ended.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attemper.capture.projections import Origin
from attemper.capture.record import AttentionCall
from attemper.checker.scale_rules import Design
from attemper.checker.scale_verdict import Applied

_SAME = 1e-6  # heads whose multiples agree so well have one


@dataclass(frozen=True)
class Operand:
    """What became of q or k since its projection: fields of `attemper.capture.projections.Origin`, which also has them.

    Attributes:
        factor: the constant factor since the projection (since the norm, where one ran); None where none was found.
        change: "unchanged", "scaled", "normalised", "by position" or "unknown".
        curve: the factor by position, [batch, tokens]; None where it is constant or unknown.
        parts: the same for the dimensions that RoPE turns and for the others, where it turns a part of the width.
        tolerance: relative spread up to which a factor counts as constant.
    """

    factor: float | None = 1.0
    change: str = "unchanged"
    curve: Tensor | None = None
    parts: "tuple[Operand, ...]" = ()
    tolerance: float = 0.0


@dataclass(frozen=True)
class Scaling:
    """How one call scales q·k.

    Attributes:
        head_dim: width of q and k; heads: number of query heads.
        scale: the factor that the call applies: a number, or a tensor where it differs by head or position.
        query, key: what became of q and k before; None where they were not followed. Reading them may wait for the device.
        queries: how many there are; first: position of the first.
        fitted: the scale was fitted to the call's output or logits, so it is known to a few digits only.
        regressed: the call's `logits_over_record`.
    """

    head_dim: int
    heads: int
    scale: float | Tensor
    query: Operand | Origin | None = Operand()
    key: Operand | Origin | None = Operand()
    queries: int = 1
    first: int = 0
    fitted: bool = False
    regressed: Tensor | None = None

    def by_regression(self) -> "Scaling | None":
        """With the scale that the model's own logits show; None where they are no multiple of q·k (or were not seen)."""
        if self.regressed is None or not bool(self.regressed.isfinite().all()):
            return None
        multiple = self.regressed.double().cpu()
        if bool((multiple - multiple.mean()).abs().max() <= _SAME * multiple.mean().abs()):
            multiple = multiple.mean()
        if not isinstance(self.scale, Tensor):
            return replace(self, scale=self.scale * multiple, fitted=True)
        scale = self.scale.double().cpu()
        by_head = multiple if scale.dim() < 2 or multiple.dim() == 0 else multiple.unsqueeze(-1)
        return replace(self, scale=scale * by_head, fitted=True)

    @property
    def hidden(self) -> tuple[str, ...]:
        """Which of q and k could not be followed to its projection."""
        return tuple(letter for letter, each in (("q", self.query), ("k", self.key)) if not each or each.change == "unknown")

    def part(self, number: int) -> "Scaling":
        """The same for the turned dimensions (0) or the others (1) of q and k."""
        return replace(self, query=_part(self.query, number), key=_part(self.key, number))

    @property
    def has_parts(self) -> bool:
        """Whether q was measured in parts."""
        return bool(self.query and self.query.parts)


def measure_call(call: AttentionCall, shown: float | Tensor | None = None) -> Scaling:
    """What the scale rules need of one call; nothing of the size of q or k, and no transfer to the host.

    Args:
        shown: the scale that the call's output shows, where it is not the one that it states.
    """
    scale = call.scale if shown is None else shown
    scale = scale.detach().clone() if isinstance(scale, Tensor) else scale
    regressed = call.logits_over_record
    queries, keys = call.query.shape[-2], call.key.shape[-2]
    return Scaling(
        head_dim=call.query.shape[-1],
        heads=call.query.shape[-3],
        scale=scale,
        query=call.query_origin,
        key=call.key_origin,
        queries=queries,
        fitted=shown is not None,
        regressed=None if regressed is None else regressed.detach(),
        first=max(keys - queries, 0) if call.self_attention and call.seam != "multihead" else 0,
    )


def applied(scaling: Scaling, scale: float) -> Applied:
    """What one head does, given the factor that its call applies."""
    query, key = scaling.query or Operand(None, "unknown"), scaling.key or Operand(None, "unknown")
    norms = query.change == "normalised", key.change == "normalised"
    return Applied(scale, _factor(query), _factor(key), *norms, fitted=scaling.fitted)


def by_head(scale: float | Tensor, heads: int) -> tuple[float, ...] | None:
    """One scale for all heads, or one for each; None where it depends on the position or the example."""
    if not isinstance(scale, Tensor):
        return (float(scale),)
    scale = scale.double().cpu()
    if bool((scale == scale.flatten()[0]).all()):
        return (scale.flatten()[0].item(),)
    if scale.dim() == 1:
        return tuple(scale.tolist())
    first = scale.flatten(0, -3)[0, :, 0] if scale.dim() >= 3 and scale.shape[-2] == heads else None
    if first is not None and torch.equal(scale, first[:, None].expand_as(scale)):
        return tuple(first.tolist())
    return None


def effective_curve(scaling: Scaling, design: Design) -> Tensor | None:
    """The factor from the projections' q·k to the logits by position: [rows, heads or 1, queries], float64 on the CPU.

    None where q's part in it is not known. A key's factor by position is that of other positions and counts as not known.
    """
    query, key = scaling.query, scaling.key
    if not query or query.change == "unknown" or (key and key.curve is not None):
        return None
    scale = torch.as_tensor(scaling.scale).detach().double().cpu()
    scale = scale.unsqueeze(-1) if scale.dim() == 1 else scale
    scale = scale.reshape((1,) * (3 - scale.dim()) + scale.shape).flatten(0, -3)
    on_query = torch.full((1, 1), design.query if _factor(query) is None else _factor(query) or 0.0, dtype=torch.float64)
    if query.curve is not None:
        on_query = query.curve.double().cpu()
    on_key = design.key if not key or _factor(key) is None else _factor(key) or 0.0
    curve = scale * on_query.unsqueeze(1) * on_key
    return curve.expand(*curve.shape[:2], scaling.queries) if curve.shape[-1] in (1, scaling.queries) else None


def _factor(operand: Operand | Origin) -> float | None:
    factor = 1.0 if operand.change == "unchanged" else operand.factor
    return 1.0 if factor is not None and abs(factor - 1.0) <= operand.tolerance else factor


def _part(operand: Operand | Origin | None, number: int) -> Operand | Origin:
    return operand.parts[number] if operand and operand.parts else Operand(None, "unknown")
