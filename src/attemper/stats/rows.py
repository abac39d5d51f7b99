"""`RowStats`: everything attemper says about one row of logits, as a record that merges.

What it must hold:
- exact figures: `max` is the largest logit, never a running bound, and `count` is a count;
- no information lost on the way: the record of a union of key sets follows from the records of its parts (see `merge`);
- one packed tensor under the ten fields that carry no gradient, so that a kernel writes, and a rank sends, one thing;
- an empty row has one definite record (count 0, lse -inf, entropy 0), so that no NaN is born from a mask.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from attemper.errors import ArgumentError

# The order of the fields in `RowStats.rest`, dimension 0. Kernels write in this order.
FIELDS = ("count", "max", "min", "argmax", "mean", "var", "p2", "p3", "product_max", "product_min")
_INDEX = {name: i for i, name in enumerate(FIELDS)}
_EMPTY = {"max": -math.inf, "min": math.inf, "argmax": -1.0, "product_max": -math.inf, "product_min": math.inf}

SATURATED_PEAK = 0.99


@dataclass(frozen=True)
class RowStats:
    """Statistics of the logits z of each query row, over its visible keys; p = softmax(z).

    The record is a frozen pytree of three tensors: `lse` and `entropy`, through which gradients flow, and `rest`, the packed
    fields that carry none.

    Attributes:
        lse: log Σ eᶻ, [..., heads, queries], float32 (float64 where the input is); −inf for an empty row.
        entropy: −Σ p ln p in nats, [..., heads, queries]; 0 for an empty row.
        rest: [10, ..., heads, queries], the fields of `FIELDS` in that order.
        sink: whether a sink takes part in lse, entropy, p2 and p3.

    Read as attributes, each [..., heads, queries]: `count` (int64), `max`, `min`, `argmax` (int64, −1 for an empty row; the
    lowest index on a tie), `mean`, `var` (population variance), `p2` = Σ p², `p3` = Σ p³, `product_max`, `product_min` (of q·k,
    before the scale). The methods from `peak` to `headroom_bits` derive a figure of each row, [..., heads, queries] too.
    Source: docs/statistics.md.
    """

    lse: Tensor
    entropy: Tensor
    rest: Tensor
    sink: bool = False

    @property
    def count(self) -> Tensor:
        """How many keys are visible, int64."""
        return self._field("count").to(torch.int64)

    @property
    def max(self) -> Tensor:
        """The largest logit of the row, exact; −inf for an empty row."""
        return self._field("max")

    @property
    def min(self) -> Tensor:
        """The smallest logit of the row, exact; +inf for an empty row."""
        return self._field("min")

    @property
    def argmax(self) -> Tensor:
        """Index of the key with the largest logit, int64; the lowest on a tie, −1 for an empty row."""
        return self._field("argmax").to(torch.int64)

    @property
    def mean(self) -> Tensor:
        """Mean of the logits, each visible key counted once."""
        return self._field("mean")

    @property
    def var(self) -> Tensor:
        """Population variance of the logits, each visible key counted once."""
        return self._field("var")

    @property
    def p2(self) -> Tensor:
        """Σ p² over the visible keys and the sink."""
        return self._field("p2")

    @property
    def p3(self) -> Tensor:
        """Σ p³ over the visible keys and the sink."""
        return self._field("p3")

    @property
    def product_max(self) -> Tensor:
        """The largest q·k of the row, before the scale; −inf for an empty row."""
        return self._field("product_max")

    @property
    def product_min(self) -> Tensor:
        """The smallest q·k of the row, before the scale; +inf for an empty row."""
        return self._field("product_min")

    def _field(self, name: str) -> Tensor:
        return self.rest[_INDEX[name]]

    # Derived figures: never stored, so that they cannot disagree with the record.

    def peak(self) -> Tensor:
        """The largest weight of a key, e^(max − lse); 0 for an empty row.

        As exact as lse, which is rounded at its own size: with float32 logits of 1e5 the peak is known to 1 %.
        """
        lse = self.lse.detach()
        return torch.where(lse == -math.inf, 0.0, torch.exp(self.max - lse))

    def centred_max(self) -> Tensor:
        """max − mean: how far the largest logit stands out. The softmax ignores a common offset; 0 for an empty row."""
        return torch.where(self._field("count") == 0, 0.0, self.max - self.mean)

    def gain(self) -> Tensor:
        """Trace of the softmax's Jacobian, Σ p(1 − p) = 1 − Σ p²; 0 for an empty row."""
        return torch.where(self.lse.detach() == -math.inf, 0.0, 1.0 - self.p2)

    def jacobian_norm(self) -> Tensor:
        """Frobenius norm of the softmax's Jacobian diag(p) − p pᵀ: √(p2 − 2·p3 + p2²).

        In float32 the difference cancels near one-hot rows: values below about 3e-4 are rounding.
        """
        return (self.p2 - 2.0 * self.p3 + self.p2.square()).clamp(min=0.0).sqrt()

    def effective_keys(self) -> Tensor:
        """e^entropy: how many keys a uniform row of the same entropy would have; 0 for an empty row."""
        return torch.where(self.lse.detach() == -math.inf, 0.0, torch.exp(self.entropy.detach()))

    def normalized_entropy(self) -> Tensor:
        """entropy / ln(count), with a sink entropy / ln(count + 1), in [0, 1]; NaN for rows with at most one visible key.

        Such rows say nothing about the softmax: leave them out of any mean (`torch.nanmean` does).
        """
        count = self._field("count")
        choices = count + 1.0 if self.sink else count
        return torch.where(count > 1, self.entropy.detach() / torch.log(choices), math.nan)

    def saturated(self) -> Tensor:
        """Bool: rows with at least two visible keys whose largest weight is above 0.99."""
        return (self._field("count") > 1) & (self.peak() > SATURATED_PEAK)

    def product_absmax(self) -> Tensor:
        """The largest |q·k| of the row, before the scale; −inf for an empty row."""
        return torch.maximum(self.product_max, -self.product_min)

    def headroom(self, dtype: torch.dtype) -> Tensor:
        """Largest finite number of `dtype` / largest |q·k|, a ratio: below 1 the product overflows. +inf for an empty row."""
        largest = self.product_absmax()
        return torch.where(largest == -math.inf, math.inf, torch.finfo(dtype).max / largest)

    def headroom_bits(self, dtype: torch.dtype) -> Tensor:
        """log2 of `headroom`: how many doublings of q·k fit below the dtype's largest number."""
        return torch.log2(self.headroom(dtype))

    def with_key_offset(self, keys_before: int) -> "RowStats":
        """The same record with `argmax` counted from a key `keys_before` places earlier.

        A record computed over a slice of the keys knows only places within the slice; shift it before merging slices.
        """
        rest = self.rest.clone()
        argmax = rest[_INDEX["argmax"]]
        argmax.copy_(torch.where(argmax < 0, argmax, argmax + keys_before))
        return RowStats(self.lse, self.entropy, rest, self.sink)

    @staticmethod
    def empty(shape: tuple[int, ...], *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> "RowStats":
        """The neutral element of `merge`: the record of rows without any visible key.

        Args:
            shape: (..., heads, queries).
        """
        lse = torch.full(shape, -math.inf, dtype=dtype, device=device)
        fields = [torch.full(shape, _EMPTY.get(name, 0.0), dtype=dtype, device=device) for name in FIELDS]
        return RowStats(lse, torch.zeros_like(lse), torch.stack(fields))

    @staticmethod
    def from_sink(sinks: Tensor, shape: tuple[int, ...]) -> "RowStats":
        """The record of the sink alone: count 0, lse = sink, p2 = p3 = 1, entropy 0. Merge it once, last.

        Args:
            sinks: [heads] or [..., heads, queries], logits of the sinks, in the dtype of the record.
            shape: (..., heads, queries) of the record.
        """
        lse = (sinks.unsqueeze(-1) if sinks.ndim == 1 else sinks).expand(shape)
        record = RowStats.empty(shape, dtype=sinks.dtype, device=sinks.device)
        for name in ("p2", "p3"):
            record._field(name).fill_(1.0)
        return RowStats(lse, record.entropy, record.rest, sink=True)

    @staticmethod
    def from_logits(
        logits: Tensor, visible: Tensor | None = None, products: Tensor | None = None, sinks: Tensor | None = None
    ) -> "RowStats":
        """The record of rows whose logits are at hand: the definition of every field, materialised.

        Args:
            logits: z, [..., heads, queries, keys], float32 or float64; values at invisible places are ignored.
            visible: bool, broadcastable to `logits`; None: all.
            products: q·k before the scale, like `logits`; None: the logits stand in for them.
            sinks: [heads] or [..., heads, queries], one further logit that takes weight; None: no sink.

        Raises:
            ArgumentError: the logits are of another dtype, in which counts and places would round.
        """
        if logits.dtype not in (torch.float32, torch.float64):
            raise ArgumentError("logits", str(logits.dtype), "float32 or float64; convert them with .float()")
        return record_and_weights(logits, visible, products, sinks)[0]


pytree.register_pytree_node(
    RowStats,
    lambda record: ([record.lse, record.entropy, record.rest], record.sink),
    lambda tensors, sink: RowStats(*tensors, sink=sink),
    serialized_type_name="attemper.stats.RowStats",
)


def record_and_weights(
    logits: Tensor, visible: Tensor | None, products: Tensor | None, sinks: Tensor | None
) -> tuple[RowStats, Tensor]:
    """What `RowStats.from_logits` returns, and the weights of the keys, [..., heads, queries, keys]; 0 in an empty row."""
    if sinks is not None and sinks.ndim == 1:
        sinks = sinks.unsqueeze(-1)
    seen = torch.ones_like(logits, dtype=torch.bool) if visible is None else visible.expand(logits.shape)
    products = logits if products is None else products
    if logits.shape[-1] == 0:
        record = RowStats.empty(tuple(logits.shape[:-1]), dtype=logits.dtype, device=logits.device)
        if sinks is not None:
            record = merge_rows(record, RowStats.from_sink(sinks, tuple(logits.shape[:-1])))
        return record, logits
    with torch.no_grad():
        count = seen.sum(-1)
        largest, argmax = torch.where(seen, logits, -math.inf).max(-1)
        mean, var = moments(logits, seen, count.to(logits.dtype))

    top = largest if sinks is None else torch.maximum(largest, sinks.detach())
    nothing = top == -math.inf
    shift = torch.where(nothing, 0.0, top)
    shifted = torch.where(seen, logits - shift.unsqueeze(-1), -math.inf)
    if sinks is not None:  # one more column, which takes weight and counts in nothing else
        shifted = torch.cat([shifted, (sinks - shift).unsqueeze(-1)], -1)
    weight = torch.exp(shifted)
    total = torch.where(nothing, 1.0, weight.sum(-1))
    log_total = torch.log(total)
    lse = torch.where(nothing, -math.inf, shift + log_total)
    p = weight / total.unsqueeze(-1)
    # −p ln p from the two parts of ln p, whose sum would round away at large logits; 0 where p is.
    surprise = log_total.unsqueeze(-1) - torch.where(p == 0.0, 0.0, shifted)
    entropy = (p * torch.where(p == 0.0, 0.0, surprise)).sum(-1)
    with torch.no_grad():
        rest = torch.stack(
            [
                count.to(logits.dtype),
                largest,
                torch.where(seen, logits, math.inf).amin(-1),
                torch.where(count > 0, argmax, -1).to(logits.dtype),
                mean,
                var,
                p.square().sum(-1),
                p.pow(3).sum(-1),
                torch.where(seen, products, -math.inf).amax(-1),
                torch.where(seen, products, math.inf).amin(-1),
            ]
        )
    record = RowStats(lse, entropy, rest.detach(), sink=sinks is not None)
    return record, p if sinks is None else p[..., :-1]


def moments(logits: Tensor, visible: Tensor | None, count: Tensor) -> tuple[Tensor, Tensor]:
    """(mean, population variance) over the visible keys, each counted once; 0 and 0 for an empty row.

    In two passes about the mean of the first, whose own rounding the second takes out: a common offset of the logits costs
    neither figure its digits.

    Args:
        logits: [..., queries, keys]; visible: bool, broadcastable to it, or None for all; count: [..., queries], in the dtype of
            the logits, how many are visible.
    """
    divisor = count.clamp(min=1.0)

    def mean_of(values: Tensor) -> Tensor:
        return (values if visible is None else torch.where(visible, values, 0.0)).sum(-1) / divisor

    first = mean_of(logits)
    deviation = logits - first.unsqueeze(-1)
    correction = mean_of(deviation)
    return first + correction, (mean_of(deviation.square()) - correction.square()).clamp(min=0.0)


def merge_rows(a: RowStats, b: RowStats) -> RowStats:
    """The record of the union of two disjoint key sets, from their records.

    With w = e^(lse − lse_union): max, min and the products by maximum and minimum, mean and var by Chan's rule, p2 by Σ w²·p2,
    p3 by Σ w³·p3, entropy by Σ w·(H − ln w). Associative and commutative up to rounding; a record with lse −inf changes nothing.
    Source: Chan, Golub, LeVeque 1983 for the variance; the rest follows from Z(β) = Σ e^(βz).
    """
    share_a, share_b = shares(a.lse, b.lse)
    lse = _safe_logaddexp(a.lse, b.lse)
    odds = _log_odds(a.lse, b.lse)
    entropy = share_a * (a.entropy + _surprise(share_a, odds)) + share_b * (b.entropy + _surprise(share_b, -odds))
    with torch.no_grad():
        rest = _merge_rest(a, b, share_a.detach(), share_b.detach())
    return RowStats(lse, entropy, rest, sink=a.sink or b.sink)


def shares(lse_a: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """How much weight each part gets in the union: e^(lse − lse_union), both 0 where both parts are empty."""
    both_empty = (lse_a == -math.inf) & (lse_b == -math.inf)
    odds = _log_odds(lse_a, lse_b)
    return torch.where(both_empty, 0.0, torch.sigmoid(odds)), torch.where(both_empty, 0.0, torch.sigmoid(-odds))


def _log_odds(lse_a: Tensor, lse_b: Tensor) -> Tensor:
    """ln of the ratio of the two parts' weights, lse_a − lse_b; 0 where both are empty."""
    both_empty = (lse_a == -math.inf) & (lse_b == -math.inf)
    return torch.where(both_empty, 0.0, lse_a) - torch.where(both_empty, 0.0, lse_b)


def _surprise(share: Tensor, odds: Tensor) -> Tensor:
    # −ln share. Where the share is 0 the term share·surprise is too, yet autograd would form 0·inf of its slope.
    return torch.where(share == 0.0, 0.0, -torch.nn.functional.logsigmoid(odds))


def _safe_logaddexp(a: Tensor, b: Tensor) -> Tensor:
    # logaddexp(-inf, -inf) is right, its gradient is NaN: keep the pair away from it.
    both_empty = (a == -math.inf) & (b == -math.inf)
    return torch.where(both_empty, -math.inf, torch.logaddexp(torch.where(both_empty, 0.0, a), torch.where(both_empty, 0.0, b)))


def _merge_rest(a: RowStats, b: RowStats, share_a: Tensor, share_b: Tensor) -> Tensor:
    count_a, count_b = a._field("count"), b._field("count")
    count = count_a + count_b
    divisor = count.clamp(min=1.0)
    part_a, part_b = count_a / divisor, count_b / divisor
    between = b.mean - a.mean
    argmax_a, argmax_b = a._field("argmax"), b._field("argmax")
    lower = torch.where(argmax_a < 0, argmax_b, torch.where(argmax_b < 0, argmax_a, torch.minimum(argmax_a, argmax_b)))
    argmax = torch.where(a.max > b.max, argmax_a, torch.where(b.max > a.max, argmax_b, lower))
    return torch.stack(
        [
            count,
            torch.maximum(a.max, b.max),
            torch.minimum(a.min, b.min),
            argmax,
            part_a * a.mean + part_b * b.mean,
            part_a * a.var + part_b * b.var + part_a * part_b * between.square(),
            share_a.square() * a.p2 + share_b.square() * b.p2,
            share_a.pow(3) * a.p3 + share_b.pow(3) * b.p3,
            torch.maximum(a.product_max, b.product_max),
            torch.minimum(a.product_min, b.product_min),
        ]
    )
