"""How far rounding may carry each result of one problem: the first-order error bound of the definition, number by number.

The error budget of the case table compares largest errors over several draws. In a single draw of a few numbers that is luck, and
a largest error says nothing of small results beside large ones. Here each sum is bounded by that of its terms' absolute values,
each term weighted with the roundings that went into it: a logit z has an error of Z = |scale|·Σ|q||k| + |z| + |bias| of them, its
weight a relative one of R = 2 + Z + (max z − z) + the same on average over the row, and so on through the gradients' formulas.
Sums of n terms add about half of √n roundings, as a random walk does; R and the products have them too.

All figures are in units of the rounding of the compute dtype. Rows of which Z alone makes every digit uncertain are not judged,
nor are rows that see something not finite: their bound is infinite. Where a build of the kernel rounds weights to bfloat16 before
they meet values, keys and queries, each such product has that rounding as well, and D = Σ output · its gradient with the output.
"""

import math

import torch
from torch import Tensor

from attemper.kernels.spec import Tile, logits_of, masking
from attemper.ops import Problem
from attemper.stats import record_and_weights

CERTAIN = 0.02  # the share of its weight that a row's roundings may move: what is left out, its square, is then small beside it


class Bounds:
    """The bounds of a problem in float64, in the normal form that kernels take.

    eps: the rounding of the precision judged; of_weights: that of weights before they are multiplied, 0 where there is none.
    """

    def __init__(self, problem: Problem, eps: float, of_weights: float = 0.0) -> None:
        self.of_weights = of_weights / eps
        # Equal terms are all rounded the same way; float64 has no yardstick beside its bound, so that it needs the surer one.
        self.steady = eps == torch.finfo(torch.float64).eps
        inputs, rules = problem.inputs, problem.rules
        batch, heads, queries, keys = self.shape = inputs.shape
        self.groups = heads // inputs.key.shape[1] if inputs.key.shape[1] else 1
        self.keep = 0.0 if rules.dropout_p >= 1.0 else 1.0 / (1.0 - rules.dropout_p)
        query, key = _finite(inputs.query), self._for_heads(_finite(inputs.key))
        value = None if inputs.value is None else self._for_heads(_finite(inputs.value))
        self.query, self.key, self.value = query.abs(), key.abs(), None if value is None else value.abs()
        self.scale = _finite(inputs.scale).expand(batch, heads, queries).unsqueeze(-1)

        visible, bias = masking(inputs, rules, Tile(0, queries, 0, keys))
        bias = torch.zeros(1, 1, 1, 1, dtype=torch.float64) if bias is None else bias
        self.visible = torch.ones(self.shape, dtype=torch.bool) if visible is None else visible.expand(self.shape)
        broken = _broken_rows(inputs.query).unsqueeze(-1) | self._for_heads(_broken_rows(inputs.key)).unsqueeze(-2)
        if inputs.value is not None:
            broken = broken | self._for_heads(_broken_rows(inputs.value)).unsqueeze(-2)
        broken = broken | ~torch.isfinite(bias) | ~torch.isfinite(inputs.scale).expand(batch, heads, queries).unsqueeze(-1)
        self.broken = (broken & self.visible).any(-1)

        products = query @ key.mT
        logits = logits_of(products, self.scale.squeeze(-1), rules.softcap, _finite(bias))
        rows = record_and_weights(logits, self.visible, products, inputs.sinks)[0]
        self.mean, self.var, self.p2, self.p3 = rows.mean, rows.var, rows.p2, rows.p3
        self.lse, self.entropy, self.count = rows.lse, rows.entropy, rows.count.clamp(min=1)

        # One more column: the sink, a weight without product or value.
        sink = torch.full(self.shape[:3], -math.inf, dtype=torch.float64)
        if inputs.sinks is not None:
            sink = inputs.sinks.unsqueeze(-1).expand(self.shape[:3]).clone()
        shown = torch.cat([torch.where(self.visible, logits, -math.inf), sink.unsqueeze(-1)], -1)
        top = shown.amax(-1, keepdim=True)
        there = shown > -math.inf
        self.shown, self.there = shown, there
        # 2^-126 is the least weight in float32; it may stand for any that is smaller.
        self.p = torch.where(there, torch.exp(shown - self.lse.unsqueeze(-1)) + 2.0**-100, 0.0)
        self.products = (1.0 + self.walk(query.shape[-1])) * self.query @ self.key.mT
        turned = self.scale.abs() * self.products
        self.z = torch.where(there, torch.cat([turned + logits.abs() + _finite(bias).abs(), sink.unsqueeze(-1).abs()], -1), 0.0)
        depth = torch.where(there, top - shown, 0.0)
        walk = self.walk(max(keys, queries * self.groups, inputs.key.shape[-1], 0 if value is None else value.shape[-1]))
        self.r = 2.0 + walk + self.z + depth + _mean(self.p, self.z + depth)
        self.surprise = torch.where(there, self.lse.unsqueeze(-1) - shown, 0.0).abs()
        self.offset_of_mean = torch.where(self.visible, logits - self.mean.unsqueeze(-1), 0.0).abs()
        self.largest_z = self.z.amax(-1)
        self.e_entropy = (self.p * (1.0 + self.r) * (1.0 + self.surprise + self.entropy.unsqueeze(-1))).sum(-1)
        self.slope, self.slope_error = torch.ones_like(turned), torch.zeros_like(turned)
        if rules.softcap is not None:
            inside = (self.scale * products / rules.softcap).abs()
            decay = torch.exp(-2.0 * inside)
            self.slope = 4.0 * decay / (1.0 + decay).square() + 2.0**-100
            # The definition itself has the slope as 1 − tanh², a difference that may cancel.
            own = torch.finfo(torch.float64).eps / eps
            self.slope_error = self.slope * (2.0 + 2.0 * (inside + turned / rules.softcap)) + own
        self.wild = (eps * (self.p * self.r).sum(-1) > CERTAIN) | (eps * self.largest_z > CERTAIN)
        self.uncertain = self.broken | self.wild

    def forward(self) -> dict[str, Tensor]:
        """The bounds of output, lse, entropy and the record's fields."""
        z, seen_z = self.largest_z, torch.where(self.visible, self.z[..., :-1], 0.0)
        mean_z, product = seen_z.sum(-1) / self.count, torch.where(self.visible, self.products, 0.0)
        product = product.amax(-1) if self.shape[-1] else torch.zeros_like(z)
        deviation = (self.offset_of_mean * (seen_z + mean_z.unsqueeze(-1))).sum(-1) / self.count
        found = {
            "max": z,
            "min": z,
            "mean": mean_z + self.mean.abs(),
            "var": 2.0 * (deviation + self.var) + 2.0**-23 * mean_z.square(),
            "lse": z + self.lse.abs() + 1.0 + self.walk(self.shape[-1]),
            "entropy": self.e_entropy,
            "p2": 2.0 * (self.p.square() * self.r).sum(-1) + 3.0 * self.p2,
            "p3": 3.0 * (self.p.pow(3) * self.r).sum(-1) + 4.0 * self.p3,
            "product_max": product,
            "product_min": product,
        }
        found = {name: self._judged(bound) for name, bound in found.items()}
        if self.value is not None:
            rounded = 1.0 + self.r + 2.0 * self.of_weights  # the weight's own rounding, and that of their sum
            found["output"] = self._judged(self.keep * (self.p * rounded)[..., :-1] @ self.value)
        return found

    def backward(self, output: Tensor | None, lse: Tensor | None, entropy: Tensor | None) -> dict[str, Tensor]:
        """The bounds of every gradient, in the shapes of the normal form, given what flows in."""
        assert self.value is not None
        keys = self.shape[-1]
        nothing = torch.zeros(self.shape[:3], dtype=torch.float64)
        flow = torch.zeros(*self.query.shape[:-1], self.value.shape[-1], dtype=torch.float64) if output is None else output.abs()
        lse = nothing if lse is None else lse.abs()
        entropy = nothing if entropy is None else entropy.abs()
        into = torch.nn.functional.pad(self.keep * flow @ self.value.mT, (0, 1))
        constant = (self.p * (1.0 + self.r) * into).sum(-1, keepdim=True)
        wide = entropy.unsqueeze(-1)
        size = into + (self.p * into).sum(-1, keepdim=True) + lse.unsqueeze(-1)
        size = size + wide * (self.surprise + self.entropy.unsqueeze(-1))
        e_logits = self.p * ((self.r + 1.0) * size + constant + wide * (self.r + 1.0 + self.e_entropy.unsqueeze(-1)))
        e_logits = torch.where(self.uncertain.unsqueeze(-1) & self.there, math.inf, e_logits)
        e_mask, e_sinks = e_logits[..., :-1], e_logits[..., -1]
        e_turned = self.slope * e_mask + self.slope_error * (self.p * size)[..., :-1]
        rounded = self.of_weights * self.slope * (self.p * (size + 2.0 * (self.p * into).sum(-1, keepdim=True)))[..., :-1]
        e_products = torch.where(e_turned == math.inf, math.inf, self.scale.abs() * (e_turned + rounded))
        reach = self.products + (self.products.amax(-1, keepdim=True) if keys else 0.0)
        weights = self.keep * (self.p * (1.0 + self.r + self.of_weights))[..., :-1]
        weights = torch.where(self.uncertain.unsqueeze(-1) & self.visible, math.inf, weights)
        return {
            "query": _times(e_products, self.key),
            "key": self._of_key_heads(_times(e_products.mT, self.query)),
            "value": self._of_key_heads(_times(weights.mT, flow)),
            "attn_mask": e_mask,
            "scale": _times(e_turned, reach, summed=True),
            "sinks": e_sinks.sum((0, 2)),
        }

    def walk(self, terms: int) -> float:
        """Roundings that a sum adds to those of its terms. More than 128 terms are added up in parts."""
        terms = min(terms, 128)
        return 0.5 * terms if self.steady else 0.5 * math.sqrt(terms)

    def _judged(self, bound: Tensor) -> Tensor:
        uncertain = self.uncertain if bound.ndim == 3 else self.uncertain.unsqueeze(-1)
        return torch.where(uncertain, math.inf, bound)

    def _for_heads(self, tensor: Tensor) -> Tensor:
        return tensor.repeat_interleave(self.groups, 1)

    def _of_key_heads(self, tensor: Tensor) -> Tensor:
        batch, heads, *rest = tensor.shape
        return tensor.reshape(batch, heads // self.groups, self.groups, *rest).sum(2)


def _finite(tensor: Tensor) -> Tensor:
    return torch.where(torch.isfinite(tensor), tensor, 0.0)


def _broken_rows(tensor: Tensor) -> Tensor:
    return ~torch.isfinite(tensor).all(-1)


def _mean(p: Tensor, of: Tensor) -> Tensor:
    return (p * of).sum(-1, keepdim=True)


def _times(bound: Tensor, factor: Tensor, *, summed: bool = False) -> Tensor:
    """A product of bounds, in which ∞ · 0 is ∞: what one of them leaves open stays open."""
    open_ = (bound == math.inf).to(bound.dtype)
    clean = torch.where(bound == math.inf, 0.0, bound)
    if summed:
        total, left_open = (clean * factor).sum(-1), open_.sum(-1)
    else:
        total, left_open = clean @ factor, open_.sum(-1, keepdim=True)
    return torch.where(left_open > 0, math.inf, total)
