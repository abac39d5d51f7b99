"""Attention weights on their way to the values, and the record that is told once both meet."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from attemper.capture.agreement import disagreement, sample, slope
from attemper.capture.arrangement import Arrangement
from attemper.capture.axes import Axes, Group
from attemper.capture.chains import Chain
from attemper.capture.products import Factors
from attemper.capture.record import Written
from attemper.capture.recorder import Recorder, crosses
from attemper.ops import without_autocast

_DOUBT = "what was read of its own code does not give the logits that its softmax received: disregard its call"


@dataclass(frozen=True)
class Attending:
    """A softmax that ran over the logits of a product, until its values are seen.

    Attributes:
        chain: from the product to the logits; arrangement: which axes are which.
        logits: a few rows of them, copied; module: name of the module whose code ran the softmax; told: filled once it was told.
    """

    chain: Chain
    arrangement: Arrangement
    logits: Tensor
    module: str
    told: list[str] = field(default_factory=list)

    @classmethod
    def begin(cls, chain: Chain, arrangement: Arrangement, logits: Tensor, module: str) -> "Attending":
        """At the softmax: the logits themselves are not held."""
        return cls(chain, arrangement, sample(arrangement, logits), module)


@dataclass(frozen=True)
class Weights:
    """Attention weights, and what they became: dropped out, cast, reshaped."""

    attending: Attending
    axes: Axes
    dropout_p: float = 0.0


def tell_with_values(recorder: Recorder, weights: Weights, factors: Factors, place: int, output: Tensor) -> bool:
    """Tell of the call if a product of the weights, its factor number `place`, sums over the keys; otherwise return False."""
    attending = weights.attending
    value = factors.right if place == 0 else factors.left
    placed = _axes_of_values(weights, factors.labels, place, value)
    if placed is None:
        return False
    axes, groups, width = placed
    chain, arrangement = attending.chain, replace(attending.arrangement, axes=axes)
    name = _common(chain.module, recorder.running())
    attending.told.append(name)
    with recorder.quiet(), torch.no_grad(), without_autocast(value.device):
        summed = axes.leaves(chain.product.summed)
        query = _operand(arrangement, arrangement.query.tensor, arrangement.query.groups, 2, summed, chain.multiplied)
        key = _operand(arrangement, arrangement.key.tensor, arrangement.key.groups, 3, summed, chain.multiplied)
        value = _operand(arrangement, value, groups, 3, width, chain.multiplied)
        described = arrangement.logits(chain)
        scale, softcap = _scale(described[0]), described[1]
        if isinstance(softcap, Tensor):
            softcap = float(softcap) if softcap.device.type == "cpu" and softcap.numel() == 1 else None
        if scale is None or (described[1] is not None and softcap is None):
            recorder.refuse(name, "its scale differs by key, or its softcap is a tensor, which no record can describe")
            return True
        mismatch = disagreement(attending.logits, query, key, chain, described)
        multiple = slope(attending.logits, query, key, described)
        again = (described[0] * multiple.view(1, -1, 1, 1), *described[1:])
        multiple = torch.where(disagreement(attending.logits, query, key, chain, again), torch.nan, multiple)
    with without_autocast(value.device):
        recorder.tell(
            name,
            seam="eager",
            query=query,
            key=key,
            value=value,
            attn_mask=described[2],
            is_causal=False,
            scale=scale,
            scale_given=scale,
            softcap=softcap,
            dropout_p=weights.dropout_p,
            self_attention=not crosses(recorder, name),
            mismatch=mismatch,
            logits_over_record=multiple,
            doubt=_DOUBT,
            written=_written(chain),
        )
    recorder.covered |= {attending.module, chain.module}
    return True


def _written(chain: Chain) -> Written:
    """A factor within baddbmm is applied before the product is rounded; any later one after it."""
    later = chain.steps if chain.product.factor == 1 else chain.steps[1:]
    return Written(chain.multiplied, not any(step.kind in ("multiply", "divide") for step in later))


def _axes_of_values(
    weights: Weights, labels: tuple[Sequence[str], ...], place: int, value: Tensor
) -> tuple[Axes, list[Group], Group] | None:
    """Axes with those of the values' width, the values' dimensions, and the width; None where the sum is not over the keys."""
    axes, ours, theirs, out = weights.axes, labels[place], labels[1 - place], labels[2]
    at = dict(zip(ours, axes.groups, strict=True))
    summed = tuple(axis for label in ours if label in theirs and label not in out for axis in at[label])
    if summed != axes.leaves(weights.attending.arrangement.keys):
        return None
    groups: list[Group] = []
    width: Group = ()
    for label, length in zip(theirs, value.shape, strict=True):
        group = at.get(label, ())
        if length != 1 and length != axes.size(group):
            group = (len(axes.sizes),)
            axes, width = replace(axes, sizes=axes.sizes | {group[0]: length}), (*width, *group)
        groups.append(group)
    return axes, groups, width


def _operand(
    arrangement: Arrangement, tensor: Tensor, groups: Sequence[Group], tokens: int, width: Group, dtype: torch.dtype
) -> Tensor:
    return arrangement.operand(tensor.detach(), groups, tokens, width).to(dtype)


def _scale(scale: float | Tensor) -> float | Tensor | None:
    """As `attention` takes it: a number, one number, [heads], or [batch, heads, queries]; None where keys differ in it."""
    if not isinstance(scale, Tensor):
        return float(scale)
    if scale.shape[3] != 1:
        return None
    if math.prod(scale.shape) == 1:
        return scale.reshape(())
    return scale.flatten() if math.prod(scale.shape) == scale.shape[1] else scale.squeeze(3)


def _common(one: str, other: str) -> str:
    """The innermost module that holds both."""
    shared: list[str] = []
    for left, right in zip(one.split("."), other.split("."), strict=False):
        if left != right:
            break
        shared.append(left)
    return ".".join(shared)
