"""How far two calls of a pair are apart: in q, k and v, in which pairs they see, in logits and in output, head by head."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from attemper.checker.applying.applied import unit_roundoff
from attemper.checker.applying.logits import View
from attemper.checker.comparing.rounding import BUDGET


@dataclass(frozen=True)
class Gaps:
    """Largest differences of one pair of calls, [heads] in float64, over real queries and the keys that both see.

    Attributes:
        query, key, value, output: of the elements; inf where the widths differ and nothing can be subtracted, output NaN
            where a seam does not show it.
        logits: of the logits, of which a row's common offset is taken off where no sink is there to feel it.
        inherited: of logits that A's rule gives for A's and for B's q and k; own: that A's and B's rules give for B's.
        only_a, only_b: pairs that only one of the two sees.
        magnitude: largest |s|·Σ|q||k|; sizes: largest |q|, |k|, |v|, |output| of either.
        pairs: how many were compared, [heads].
        squares, products: Σ wA² and Σ wA·wB of the scaled products w = s·u, [heads, queries].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    logits: Tensor
    inherited: Tensor
    own: Tensor
    only_a: Tensor
    only_b: Tensor
    magnitude: Tensor
    sizes: tuple[float, float, float, float]
    pairs: Tensor
    squares: Tensor
    products: Tensor

    @property
    def factor(self) -> Tensor:
        """Least squares of B's scaled products on A's, [heads]; NaN where A's are 0."""
        return self.products.sum(-1) / self.squares.sum(-1)


@dataclass(frozen=True)
class Allowance:
    """What rounding explains of each gap, [heads] each."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    logits: Tensor

    def parts(self, gaps: Gaps) -> tuple[str, ...]:
        """Names of what is apart beyond it, in the order in which attention computes them."""
        seen = bool(gaps.only_a.any()) or bool(gaps.only_b.any())
        beyond = {
            "visible": seen,
            "logits": bool((gaps.logits > self.logits).any()),
            "value": bool((gaps.value > self.value).any()),
            "output": bool((gaps.output > self.output).any()),
        }
        return tuple(name for name, is_beyond in beyond.items() if is_beyond)


def measure(a: View, b: View, real: Tensor, *, one_rule: bool = False) -> Gaps:
    """The gaps of a pair of calls of one shape.

    Args:
        real: bool [batch, queries], the queries that are no padding.
        one_rule: the two have one rule, so that all that differs is inherited.
    """
    # A's rule on B's q and k: with A's own scale, in which a factor by position may depend on nothing but the position.
    ruled = b if one_rule else View(dataclasses.replace(a.call, query=b.call.query, key=b.call.key, value=b.call.value))
    heads, queries, keys = a.shape[1:]
    zero = a.query.new_zeros(heads)
    logits, inherited, own, magnitude = zero, zero, zero, zero
    only_a, only_b, pairs = zero.long(), zero.long(), zero.long()
    seen = torch.zeros(a.shape[0], keys, dtype=torch.bool, device=a.query.device)
    squares, products = a.query.new_zeros(heads, queries), a.query.new_zeros(heads, queries)
    felt = a.sinks is not None or b.sinks is not None
    for rows in a.tiles():
        one, two = a.logits(rows), b.logits(rows)
        three = two if one_rule else ruled.logits(rows)
        counted = real[:, None, rows, None]
        both = one.visible & two.visible & counted
        seen |= both.any(1).any(1)
        pairs = pairs + _count(both)
        only_a = only_a + _count(one.visible & ~two.visible & counted)
        only_b = only_b + _count(two.visible & ~one.visible & counted)
        apart = torch.where(both, subtract(two.logits, one.logits), 0.0)
        common = apart.sum(-1, keepdim=True) / both.sum(-1, keepdim=True).clamp(min=1)
        logits = torch.maximum(logits, _largest(apart if felt else torch.where(both, apart - common, 0.0).nan_to_num(torch.inf)))
        own = torch.maximum(own, _largest(torch.where(both, subtract(two.logits, three.logits), 0.0)))
        inherited = torch.maximum(inherited, _largest(torch.where(both, subtract(three.logits, one.logits), 0.0)))
        magnitude = torch.maximum(
            magnitude, _largest(torch.where(both, _finite(torch.maximum(a.magnitude(rows), b.magnitude(rows))), 0.0))
        )
        first = torch.where(both, one.scaled, 0.0)
        squares[:, rows] = first.square().sum((0, -1))
        products[:, rows] = (first * torch.where(both, two.scaled, 0.0)).sum((0, -1))
    counted = real[:, None, :, None]
    keys_seen = seen[:, None, :, None]
    out_a, out_b = a.call.output, b.call.output
    return Gaps(
        query=_gap(a.query, b.query, counted),
        key=_gap(a.key, b.key, keys_seen),
        value=_gap(a.value, b.value, keys_seen),
        output=zero + torch.nan if out_a is None or out_b is None else _gap(out_a.double(), out_b.double(), counted),
        logits=logits,
        inherited=inherited,
        own=own,
        only_a=only_a,
        only_b=only_b,
        magnitude=magnitude,
        sizes=(
            _size(counted, a.query, b.query),
            _size(keys_seen, a.key, b.key),
            _size(keys_seen, a.value, b.value),
            0.0 if out_a is None or out_b is None else _size(counted, out_a.double(), out_b.double()),
        ),
        pairs=pairs,
        squares=squares,
        products=products,
    )


def allowance(gaps: Gaps, peers: list[Gaps], roundoff: float, output_bound: Tensor) -> Allowance:
    """Twice what the peers show, and the last rounding.

    Args:
        peers: of the same call, against runs whose roundings were drawn anew; roundoff: the coarser dtype's.
        output_bound: [heads], how far the output may be off by the arithmetic of the call itself.
    """

    def allowed(name: str, last: Tensor | float) -> Tensor:
        own = torch.stack([_finite(getattr(peer, name)) for peer in peers]).amax(0) if peers else torch.zeros_like(gaps.logits)
        return BUDGET * own + last

    q, k, v, output = gaps.sizes
    return Allowance(
        query=allowed("query", 2 * roundoff * q),
        key=allowed("key", 2 * roundoff * k),
        value=allowed("value", 2 * roundoff * v),
        output=allowed("output", 2 * roundoff * output + output_bound),
        logits=allowed("logits", 2 * roundoff * gaps.magnitude),
    )


def coarser(a: View, b: View) -> float:
    """Unit roundoff of the coarser of the two dtypes."""
    return max(unit_roundoff(a.call.query.dtype), unit_roundoff(b.call.query.dtype))


def subtract(b: Tensor, a: Tensor) -> Tensor:
    """b − a, 0 where both are the same infinity or both NaN, infinite where one of them is not finite."""
    apart = b - a
    if bool(torch.isfinite(apart).all()):
        return apart
    alike = (a == b) | (a.isnan() & b.isnan())
    return torch.where(alike, 0.0, apart).nan_to_num(torch.inf, torch.inf, -torch.inf)


def _largest(apart: Tensor) -> Tensor:
    """Largest absolute value, [heads]."""
    return apart.abs().amax((0, 2, 3)) if apart.numel() else apart.new_zeros(apart.shape[1])


def _finite(tensor: Tensor) -> Tensor:
    """0 for what is no number or infinite: it allows for nothing."""
    return tensor.nan_to_num(0.0, 0.0, 0.0)


def _count(pairs: Tensor) -> Tensor:
    return pairs.sum((0, 2, 3))


def _gap(a: Tensor, b: Tensor, counted: Tensor) -> Tensor:
    if a.shape != b.shape:
        return a.new_full((a.shape[1],), torch.inf)
    return _largest(torch.where(counted, subtract(b, a), 0.0))


def _size(counted: Tensor, *tensors: Tensor) -> float:
    largest = [float(_finite(torch.where(counted, tensor, 0.0)).abs().max()) for tensor in tensors if tensor.numel()]
    return max(largest, default=0.0)
