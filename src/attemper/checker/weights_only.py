"""Attention by its weights alone: what no logit can exceed, and how the projections' norms compare. No forward pass is made.

What it must hold: a bound is a bound, for every input; where something stands between that is not understood, there is none.
With x = g∘n + b behind a norm and ‖n‖ ≤ √D, |scale·q·k| ≤ scale·(‖W_q·diag(g)‖·√D + ‖W_q·b + b_q‖)·(the same of k) for each
head. RoPE turns q and k and leaves their lengths. Behind QK-norm over m numbers, ‖q‖ ≤ √m·max|g| of the head.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attemper.checker.findings import finding, heads_in_words
from attemper.checker.load import Subject
from attemper.checker.measure import dtype_name
from attemper.checker.norm_before import is_cross, norms_before
from attemper.checker.numeric_range import LARGEST_FLOAT16
from attemper.checker.scales_expected import expected_scale
from attemper.checker.streaming import values
from attemper.checker.thresholds import Thresholds
from attemper.errors import UnsupportedError
from attemper.report import Finding, Severity, WeightRow
from attemper.weights.families import projections_of, value_weight
from attemper.weights.layout import Heads, Projections
from attemper.weights.norms import gain
from attemper.weights.spectral import spectral_norm


@dataclass(frozen=True)
class Weighed:
    """Rows, findings, and modules that could not be looked at, with the reason."""

    rows: tuple[WeightRow, ...]
    findings: tuple[Finding, ...]
    unseen: tuple[tuple[str, str], ...]


@torch.no_grad()
def weigh(subject: Subject, limits: Thresholds) -> Weighed:
    """Look at the projections of every attention module."""
    rows, findings, unseen = [], [], []
    dtype = dtype_name(subject.model)
    for name, module in subject.model.named_modules():
        try:
            projections = projections_of(subject.model, name)
            if projections is None:
                continue
            row, scale, why_not = _weigh(subject.model, subject.config, name, module, projections)
        except UnsupportedError as error:
            unseen.append((name, str(error)))
            continue
        rows.append(row)
        findings += _findings(row, scale, dtype, limits)
        if why_not:
            unseen.append((name, f"its logits are not bounded: {why_not}"))
    return Weighed(tuple(rows), tuple(findings), tuple(unseen))


def _weigh(
    model: nn.Module, config: Any, name: str, module: nn.Module, projections: Projections
) -> tuple[WeightRow, float | None, str]:
    """The row, the scale of the architecture's rule, and why there is no bound ("" where there is one)."""
    scale = expected_scale(model, name, config, head_dim=projections.head_dim, heads=projections.heads).value
    before, norm, why_not = norms_before(model, name), "", ""
    bounds: tuple[float, ...] = ()
    key = projections.key
    if projections.shared_key:
        why_not = "a part of its keys is shared and made elsewhere (MLA)"
    elif key is None:
        why_not = "where its keys are made is not known, or values are made of them"
    elif scale is None:
        why_not = "its scale is learned"
    elif before is None and not (projections.query.dim is None and key.dim is None):
        why_not = "no norm is known to stand in front of it, so its input may be of any size"
        if is_cross(name):
            why_not = (
                "its keys are made of what an encoder gives (cross attention), and which norms its queries and that encoder's "
                "outputs come from is not known, so either may be of any size"
            )
    else:
        behind_norms = projections.query.dim is None and key.dim is None
        norm = "QK-norm" if behind_norms or before is None else str(before)
        x, y = (None, None) if behind_norms or before is None else (_Input.of(model, each) for each in before)
        length_q, length_k = _length(module, projections.query, x), _length(module, key, y)
        length_q = length_q.expand(projections.heads)
        length_k = length_k.repeat_interleave(projections.heads // length_k.shape[0])
        bound = abs(scale) * length_q * length_k
        cap = getattr(config, "attn_logit_softcapping", None)
        bounds = tuple((bound if not cap else bound.clamp(max=float(cap))).tolist())
    norms = _norms(module, projections)
    return WeightRow(name, projections.heads, bounds, *norms, norm), scale, why_not


@dataclass(frozen=True)
class _Input:
    """What a norm lets through: g∘n + b with ‖n‖ ≤ √D."""

    gain: Tensor
    bias: Tensor

    @classmethod
    def of(cls, model: nn.Module, name: str) -> "_Input":
        norm: Any = model.get_submodule(name)
        width = norm.weight.numel()
        path, _, child = name.rpartition(".")
        offset = gain(path, child, norm, 1, width).offset
        bias = getattr(norm, "bias", None)
        wide = values(norm.weight).double()
        return cls(wide + offset, torch.zeros_like(wide) if bias is None else values(bias).double())


def _length(module: nn.Module, heads: Heads, x: _Input | None) -> Tensor:
    """[heads]: what ‖q‖, or ‖k‖, of each head cannot exceed."""
    first = values(module.get_parameter(heads.parameters[0])).double()
    bias = values(module.get_parameter(heads.parameters[1])).double()[heads.features] if len(heads.parameters) > 1 else None
    if heads.dim is None:
        largest = (first.flatten() + heads.offset)[heads.features].abs().amax(-1) * first.numel() ** 0.5
        return largest if bias is None else largest + bias.norm(dim=-1)
    if x is None:
        raise UnsupportedError("one of q and k is normalised and the other is not, which is not understood")
    weight = (first if heads.dim == 0 else first.mT)[heads.features]
    if weight.shape[-1] != len(x.gain):
        raise UnsupportedError(f"the norm in front has {len(x.gain)} numbers and the projection takes {weight.shape[-1]}")
    constant = weight @ x.bias + (0.0 if bias is None else bias)
    weight = weight * x.gain
    # Of W, [d, D], by the d x d matrix W·Wᵀ: exact, and far cheaper than all singular values.
    largest = torch.linalg.eigvalsh(weight @ weight.mT)[:, -1].clamp(min=0).sqrt()
    return largest * len(x.gain) ** 0.5 + constant.norm(dim=-1)


def _norms(module: nn.Module, projections: Projections) -> tuple[float | None, float | None, float | None]:
    """‖W_q‖, ‖W_k‖ and ‖W_v‖, of all heads together."""

    def norm(parameter: str, features: Tensor | None, dim: int) -> float:
        weight = values(module.get_parameter(parameter))
        weight = weight if dim == 0 else weight.mT
        return spectral_norm(weight if features is None else weight[features])

    query, key, names = projections.query, projections.key, projections.weights
    if query.dim is not None:
        of_query = norm(query.parameters[0], query.features.flatten(), query.dim)
        of_key = None if key is None or key.dim is None else norm(key.parameters[0], key.features.flatten(), key.dim)
    elif len(names) == 2:  # behind norms: the projections are whole matrices of their own
        of_query, of_key = norm(names[0], None, 0), norm(names[1], None, 0)
    else:
        return None, None, None
    found = value_weight(module, projections)
    return of_query, of_key, None if found is None else norm(*found, query.dim or 0)


def _findings(row: WeightRow, scale: float | None, dtype: str, limits: Thresholds) -> Iterator[Finding]:
    largest = max(row.bounds, default=0.0)
    if largest > limits.logit_bound:
        heads = [head for head, bound in enumerate(row.bounds) if bound > limits.logit_bound]
        product = largest / abs(scale) if scale else largest
        overflows = dtype == "float16" and product > LARGEST_FLOAT16
        past = f"; before the scale {product:.3g}, past float16's 65504" if product > LARGEST_FLOAT16 else ""
        yield finding(
            "ATT306",
            f"{heads_in_words(heads)}: by their weights alone, logits could reach {largest:.4g} (threshold "
            f"{limits.logit_bound:g}){past}.",
            cost="None by itself: some input might reach such a logit, and those that occur may not.",
            module=row.module,
            heads=heads if len(heads) < row.heads else (),
            measured=largest,
            threshold=limits.logit_bound,
            severity=Severity.WARNING if overflows else None,
        )
    if row.query_norm is not None and row.key_norm is not None and row.value_norm:
        ratio = (row.query_norm * row.key_norm) ** 0.5 / row.value_norm
        if ratio > limits.norm_ratio and row.norm != "QK-norm":
            yield finding(
                "ATT307",
                f"the spectral norms of W_q and W_k, {row.query_norm:.3g} and {row.key_norm:.3g}, are {ratio:.3g} times that of "
                f"W_v, {row.value_norm:.3g} (threshold {limits.norm_ratio:g} times).",
                cost="In training, logits that grow so sharpen the softmax until its entropy collapses.",
                module=row.module,
                measured=ratio,
                threshold=limits.norm_ratio,
            )
