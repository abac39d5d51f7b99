"""`HeadStats`: rows reduced to heads, as sums, extremes and histograms, so that it merges over batches, steps and ranks.

What it must hold:
- merging is addition and maximum of tensors of fixed shape, so that one packed all-reduce per kind does it;
- counts are exact (int64) and quantiles come from histograms whose edges never move;
- padded queries are left out altogether, empty rows are counted and left out of every mean;
- a row with a NaN or infinite logit is counted and left out of the sums, so that one bad row does not hide the others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attemper.errors import ArgumentError
from attemper.stats.histograms import HISTOGRAM_EDGES, SHARES, histogram
from attemper.stats.rows import FIELDS, SATURATED_PEAK, RowStats
from attemper.stats.shapes import broadcasts_to

_COUNTS = ("rows", "empty_rows", "softmax_rows", "saturated_rows", "nonfinite_rows")
# Minima are kept negated, so that merging is one maximum.
_EXTREMES = ("max", "negated_min", "product_max", "negated_product_min", "centred_max")
_SUMS = ("centred_max", "entropy", "normalized_entropy", "gain", "peak", "jacobian_norm")


@dataclass(frozen=True)
class HeadStats:
    """Statistics of each head over all its rows: [heads] tensors, float64 and int64, on the device of the rows.

    Attributes:
        counts: int64 [5, heads]; extremes: float64 [5, heads]; sums: float64 [6, heads]: read them through the properties.
        histograms: name → int64 [heads, bins]; bin i holds values in [edge i − 1, edge i), the outer bins are open.
            Names and edges: `HISTOGRAM_EDGES`.

    Means are over `rows` less `nonfinite_rows`; shares and normalized entropy over `softmax_rows`. A mean over no row is NaN.
    """

    counts: Tensor
    extremes: Tensor
    sums: Tensor
    histograms: dict[str, Tensor]

    @staticmethod
    def from_rows(rows: RowStats, query_mask: Tensor | None = None) -> "HeadStats":
        """Reduce a record of rows over everything but the heads.

        Args:
            rows: record of shape [..., heads, queries].
            query_mask: bool [batch, queries] (or anything that broadcasts to [..., queries]), True where the query is a real
                token and False where it is padding; None: all are real.

        Raises:
            ArgumentError: the mask does not fit the rows.
        """
        return HeadStats.reduce(RowsByHead.of(rows, query_mask))

    @staticmethod
    def reduce(of_heads: "RowsByHead") -> "HeadStats":
        """Reduce rows that lie head by head."""
        rows, real = of_heads
        count = rows.rest[FIELDS.index("count")]
        shown, several = count > 0, count > 1
        empty = ~shown
        if real is not None:
            shown, several, empty = shown & real, several & real, empty & real
        # Of an infinite negative logit lse knows nothing; the mean does.
        finite = shown & (rows.lse.abs() < math.inf) & (rows.mean.abs() < math.inf)
        several = several & finite
        centred, peak, normalized = rows.centred_max(), rows.peak(), rows.normalized_entropy()
        # Figure by figure: all of them in one tensor would no longer lie in the cache.
        counted = (shown, empty, several, several & (peak > SATURATED_PEAK), shown & ~finite)
        counts = torch.stack([each.sum(-1) for each in counted])

        candidates = (rows.max, -rows.min, rows.product_max, -rows.product_min, centred)
        extremes = torch.stack([_largest(torch.where(shown, each, -math.inf)) for each in candidates])

        summed = [torch.where(finite, each, 0.0) for each in (centred, rows.entropy, rows.gain(), peak, rows.jacobian_norm())]
        summed.insert(_SUMS.index("normalized_entropy"), torch.where(several, normalized, 0.0))
        sums = torch.stack([each.sum(-1, dtype=torch.float64) for each in summed])

        of_finite, of_several = finite.long(), several.long()
        histograms = {
            "max": histogram("max", rows.max, of_finite),
            "centred_max": histogram("centred_max", centred, of_finite),
            "normalized_entropy": histogram("normalized_entropy", normalized, of_several),
            "peak": histogram("peak", peak, of_several),
        }
        return HeadStats(counts, extremes, sums, histograms)

    def split(self, heads: Sequence[int]) -> "tuple[HeadStats, ...]":
        """The statistics of the first so many heads, of the next, and so on."""
        names = list(self.histograms)
        parts = (self.counts.split(heads, -1), self.extremes.split(heads, -1), self.sums.split(heads, -1))
        histograms = (self.histograms[name].split(heads) for name in names)
        return tuple(
            HeadStats(*three, dict(zip(names, rest, strict=True)))
            for three, rest in zip(zip(*parts, strict=True), zip(*histograms, strict=True), strict=True)
        )

    def merge(self, other: "HeadStats") -> "HeadStats":
        """The statistics over the rows of both: counts, sums and histograms add up, extremes are the larger ones.

        Raises:
            ArgumentError: the two do not have the same number of heads.
        """
        if self.heads != other.heads:
            raise ArgumentError("other", f"{other.heads} heads", f"{self.heads} heads, as many as this record has")
        return HeadStats(
            self.counts + other.counts,
            torch.maximum(self.extremes, other.extremes),
            self.sums + other.sums,
            {name: histogram + other.histograms[name] for name, histogram in self.histograms.items()},
        )

    @property
    def heads(self) -> int:
        """How many heads."""
        return self.counts.shape[-1]

    @property
    def rows(self) -> Tensor:
        """Rows counted: real queries with at least one visible key."""
        return self._count("rows")

    @property
    def empty_rows(self) -> Tensor:
        """Real queries with no visible key."""
        return self._count("empty_rows")

    @property
    def softmax_rows(self) -> Tensor:
        """Finite rows with at least two visible keys: those that say something about the softmax."""
        return self._count("softmax_rows")

    @property
    def nonfinite_rows(self) -> Tensor:
        """Rows with a NaN or infinite logit, or whose mean overflows; left out of every mean and histogram."""
        return self._count("nonfinite_rows")

    @property
    def max(self) -> Tensor:
        """Largest logit; −inf without rows."""
        return self._extreme("max")

    @property
    def min(self) -> Tensor:
        """Smallest logit; +inf without rows."""
        return -self._extreme("negated_min")

    @property
    def product_max(self) -> Tensor:
        """Largest q·k, before the scale; −inf without rows."""
        return self._extreme("product_max")

    @property
    def product_min(self) -> Tensor:
        """Smallest q·k, before the scale; +inf without rows."""
        return -self._extreme("negated_product_min")

    @property
    def product_absmax(self) -> Tensor:
        """Largest |q·k|, before the scale; −inf without rows."""
        return torch.maximum(self.product_max, -self.product_min)

    @property
    def centred_max(self) -> Tensor:
        """Largest max − mean of a row; −inf without rows."""
        return self._extreme("centred_max")

    @property
    def mean_centred_max(self) -> Tensor:
        """Mean of max − mean over the rows."""
        return self._mean("centred_max")

    @property
    def mean_entropy(self) -> Tensor:
        """Mean entropy of a row, in nats."""
        return self._mean("entropy")

    @property
    def mean_normalized_entropy(self) -> Tensor:
        """Mean of entropy / ln(count), over rows with at least two visible keys."""
        return self._sum("normalized_entropy") / self.softmax_rows

    @property
    def mean_gain(self) -> Tensor:
        """Mean trace of the softmax's Jacobian, 1 − Σ p²."""
        return self._mean("gain")

    @property
    def mean_peak(self) -> Tensor:
        """Mean of the largest weight of a row."""
        return self._mean("peak")

    @property
    def mean_jacobian_norm(self) -> Tensor:
        """Mean Frobenius norm of the softmax's Jacobian."""
        return self._mean("jacobian_norm")

    @property
    def saturated_share(self) -> Tensor:
        """Share of rows whose largest weight is above 0.99, among rows with at least two visible keys."""
        return self._count("saturated_rows").double() / self.softmax_rows

    def headroom(self, dtype: torch.dtype) -> Tensor:
        """Largest finite number of `dtype` / largest |q·k|: below 1 the product overflows. +inf without rows."""
        largest = self.product_absmax
        return torch.where(largest == -math.inf, math.inf, torch.finfo(dtype).max / largest)

    def histogram(self, name: str) -> tuple[Tensor, Tensor]:
        """(counts int64 [heads, bins], edges float64 [bins − 1]) of one figure; bin i holds [edge i − 1, edge i).

        Args:
            name: one of "max", "centred_max", "normalized_entropy", "peak".

        Raises:
            ArgumentError: no such histogram.
        """
        if name not in self.histograms:
            raise ArgumentError("name", repr(name), f"one of {', '.join(map(repr, self.histograms))}")
        return self.histograms[name], HISTOGRAM_EDGES[name]

    def quantile(self, name: str, q: float) -> Tensor:
        """The q-quantile of one figure, [heads], read from its histogram: linear within a bin, NaN without rows.

        Known to the width of a bin: 9 % of a logit between 1/16 and 131072, 0.01 of a share. Beyond the outer edges the answer
        is the edge.

        Args:
            name: as in `histogram`.
            q: in [0, 1].

        Raises:
            ArgumentError: no such histogram, or q outside [0, 1].
        """
        if not 0.0 <= q <= 1.0:
            raise ArgumentError("q", q, "a number in [0, 1]")
        counts, edges = self.histogram(name)
        edges = edges.to(counts.device)
        total = counts.sum(-1)
        wanted = (q * total.double()).clamp(min=1.0)  # a rank: the smallest value is the first
        cumulative = counts.cumsum(-1)
        index = (cumulative.double() < wanted.unsqueeze(-1)).sum(-1).clamp(max=counts.shape[-1] - 1)
        inside = torch.gather(counts, -1, index.unsqueeze(-1)).squeeze(-1).double()
        before = torch.gather(cumulative, -1, index.unsqueeze(-1)).squeeze(-1).double() - inside
        share = torch.where(inside > 0, (wanted - before) / inside.clamp(min=1.0), 0.0)
        low, high = _outer(name, edges)
        lower = torch.cat([low, edges])[index]
        upper = torch.cat([edges, high])[index]
        return torch.where(total > 0, lower + share * (upper - lower), math.nan)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form from which `from_dict` makes the same record: numbers, lists, "inf" and "-inf".

        Histograms are sparse: for each head a list of [bin, count].
        """
        return {
            "heads": self.heads,
            "counts": {name: self.counts[i].tolist() for i, name in enumerate(_COUNTS)},
            "extremes": {name: [_to_json(x) for x in self.extremes[i].tolist()] for i, name in enumerate(_EXTREMES)},
            "sums": {name: [_to_json(x) for x in self.sums[i].tolist()] for i, name in enumerate(_SUMS)},
            "histograms": {
                name: [[[i, n] for i, n in enumerate(head) if n] for head in histogram.tolist()]
                for name, histogram in self.histograms.items()
            },
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> "HeadStats":
        """The record that `to_dict` wrote.

        Raises:
            ArgumentError: a part is missing, of the wrong length, or names a bin that there is not.
        """
        try:
            heads = int(data["heads"])
            counts = torch.tensor([data["counts"][name] for name in _COUNTS], dtype=torch.int64, device="cpu")
            kind: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
            extremes = torch.tensor([[float(x) for x in data["extremes"][name]] for name in _EXTREMES], **kind)
            sums = torch.tensor([[float(x) for x in data["sums"][name]] for name in _SUMS], **kind)
            histograms = {name: _dense(data["histograms"][name], len(edges) + 1) for name, edges in HISTOGRAM_EDGES.items()}
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ArgumentError("data", f"a dictionary with a fault ({error!r})", "what HeadStats.to_dict returned") from error
        if {counts.shape[-1], extremes.shape[-1], sums.shape[-1], *map(len, histograms.values())} != {heads}:
            raise ArgumentError("data", f"columns of differing length for {heads} heads", "what HeadStats.to_dict returned")
        return HeadStats(counts, extremes, sums, histograms)

    def _count(self, name: str) -> Tensor:
        return self.counts[_COUNTS.index(name)]

    def _extreme(self, name: str) -> Tensor:
        return self.extremes[_EXTREMES.index(name)]

    def _sum(self, name: str) -> Tensor:
        return self.sums[_SUMS.index(name)]

    def _mean(self, name: str) -> Tensor:
        return self._sum(name) / (self.rows - self.nonfinite_rows)


def _real_rows(rows: RowStats, query_mask: Tensor | None) -> Tensor | None:
    """Bool [1, all rows of a head]; None: all are real."""
    if query_mask is None:
        return None
    shape = rows.lse.shape
    per_query = (*shape[:-2], shape[-1])
    if query_mask.dtype != torch.bool or not broadcasts_to(query_mask.shape, per_query):
        given = f"{query_mask.dtype} of shape {tuple(query_mask.shape)}"
        raise ArgumentError("query_mask", given, f"bool, broadcastable to {per_query}")
    return query_mask.to(rows.lse.device).expand(per_query).reshape(1, -1)


class RowsByHead(NamedTuple):
    """A record of rows that lie head by head, each figure contiguous: what `HeadStats.reduce` reduces.

    Attributes:
        rows: without gradients, of shape [heads, all rows of a head].
        real: bool [1 or heads, all rows of a head], False where a row is padding; None: all are real.
    """

    rows: RowStats
    real: Tensor | None

    @staticmethod
    def of(rows: RowStats, query_mask: Tensor | None = None) -> "RowsByHead":
        """A record of shape [..., heads, queries]; arguments and errors as of `HeadStats.from_rows`."""

        def flat(values: Tensor) -> Tensor:
            return values.detach().movedim(-2, 0).flatten(1)

        flattened = RowStats(flat(rows.lse), flat(rows.entropy), rows.rest.movedim(-2, 1).flatten(2), rows.sink)
        return RowsByHead(flattened, _real_rows(rows, query_mask))

    @property
    def heads(self) -> int:
        """How many heads."""
        return self.rows.lse.shape[0]

    @property
    def likeness(self) -> tuple[object, ...]:
        """Equal of records that can be stacked."""
        lse = self.rows.lse
        return lse.shape[1], lse.dtype, lse.device, self.rows.sink, self.real is None

    @staticmethod
    def stack(records: "Sequence[RowsByHead]") -> "RowsByHead":
        """The heads of all records, which are alike, in their order."""
        if len(records) == 1:
            return records[0]
        rows = [record.rows for record in records]
        lse, entropy = torch.cat([each.lse for each in rows]), torch.cat([each.entropy for each in rows])
        rest = torch.cat([each.rest for each in rows], 1)
        real = [record.real.expand(record.heads, -1) for record in records if record.real is not None]
        return RowsByHead(RowStats(lse, entropy, rest, rows[0].sink), torch.cat(real) if real else None)


def _largest(values: Tensor) -> Tensor:
    """Over the last dimension, in float64; NaN left out, −inf where nothing remains. Writes over what it is given."""
    if values.shape[-1] == 0:
        return torch.full(values.shape[:-1], -math.inf, dtype=torch.float64, device=values.device)
    return values.nan_to_num_(nan=-math.inf, posinf=math.inf, neginf=-math.inf).amax(-1).double()


def _dense(heads: list[list[tuple[int, int]]], bins: int) -> Tensor:
    histogram = torch.zeros(len(heads), bins, dtype=torch.int64, device="cpu")
    for head, entries in enumerate(heads):
        for i, n in entries:
            if not 0 <= i < bins:
                raise IndexError(f"bin {i} of {bins}")
            histogram[head, i] = n
    return histogram


def _outer(name: str, edges: Tensor) -> tuple[Tensor, Tensor]:
    # The outer bins are open; for shares they end at 0 and 1, for logits nothing is known beyond the edge.
    if name in SHARES:
        return edges.new_zeros(1), edges.new_ones(1)
    return edges[:1], edges[-1:]


def _to_json(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
