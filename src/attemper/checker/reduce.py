"""Reduces one attention call to small tensors while the forward pass runs, and reads them back once it has ended."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attemper.capture.record import AttentionCall
from attemper.checker.backend import Shown, measure_output
from attemper.checker.evidence import Ahead, CallEvidence, KeyShare, Misread
from attemper.checker.orders import Measured, read_orders, run_orders
from attemper.checker.scale_measured import measure_call
from attemper.checker.thresholds import DEFAULTS, Thresholds
from attemper.checker.visibility import is_self_attention, looks_ahead, sees_future, sees_padding
from attemper.stats import HeadStats


@dataclass(frozen=True)
class Reduced:
    """One call, reduced: nothing of the size of q or k, every figure still on its device.

    Attributes:
        place: module, call, order, seam, queries, keys, head_dim, kv_heads, softcap, self_attention and written of the call.
        stats, scaling: as in `CallEvidence`; scale: the call's own.
        figures: the tensors of `CallEvidence` by name.
        sink: [heads] tensors and the number of rows they are over.
        mismatch: of the call; shown: what its output shows; orders: what orders of operations do to it.
    """

    place: dict[str, Any]
    stats: HeadStats
    scale: float | Tensor
    scaling: Any
    figures: dict[str, Tensor]
    sink: dict[str, Tensor]
    mismatch: Tensor | None
    shown: Shown
    orders: Measured | None

    @property
    def holds(self) -> bool:
        """Whether the record agreed with the model's own logits, where they were seen; what did not is named as not seen."""
        return self.mismatch is None or not bool(self.mismatch)


def reduce_call(call: AttentionCall, padding: Tensor | None, limits: Thresholds = DEFAULTS) -> Reduced:
    """Reduce a call, inside the forward pass.

    Args:
        call: with a query at least.
        padding: the inputs' own attention mask as bool [batch, tokens], True = real, or None; used where it fits the call.
        limits: the thresholds; that of gain is needed row by row.
    """
    rows = call.row_stats()
    shown = call.query_mask()
    batch, queries, keys = call.query.shape[0], call.query.shape[-2], call.key.shape[-2]
    stated = padding if padding is not None and padding.shape == (batch, keys) else None
    whole = padding is None or queries == padding.shape[1]
    everywhere = torch.ones(batch, queries, dtype=torch.bool, device=rows.lse.device)
    real = stated if stated is not None and queries == keys else shown if shown is not None else everywhere
    counted = (everywhere if shown is None else shown).unsqueeze(-2) & (rows.count > 0)

    largest, where = _by_head(torch.where(counted, rows.max, -torch.inf)).max(-1)
    no = torch.zeros((), dtype=torch.bool)
    figures = {
        "largest_logit": largest.double(),
        "largest_logit_centred": _by_head(rows.centred_max()).gather(-1, where.unsqueeze(-1)).squeeze(-1).double(),
        # A piece of the sequence (a chunk, a window) may hold padding only, and nothing says which of its tokens are real.
        "masked_rows": _by_head(real.unsqueeze(-2) & (rows.count == 0) & (call.seam != "eager" or whole)).sum(-1),
        "real_rows": real.sum(),
        "sees_future": sees_future(call, real) if is_self_attention(call) else no.expand(call.query.shape[1]),
        **_ahead(call, real),
        "sees_padding": sees_padding(call, real, stated) if stated is not None else no,
    }
    place = {
        "module": call.module,
        "call": call.call,
        "order": call.order,
        "seam": call.seam,
        "queries": queries,
        "keys": keys,
        "head_dim": call.query.shape[-1],
        "kv_heads": call.key.shape[-3],
        "softcap": call.softcap,
        "self_attention": is_self_attention(call),
        "written": call.written,
    }
    several = counted & (rows.count > 1)
    figures |= {
        "several": _by_head(several).sum(-1),
        "dead": _by_head(several & (rows.gain() < limits.dead_gain)).sum(-1),
        **_previous(rows.argmax, several, is_self_attention(call)),
    }
    first = real.int().argmax(-1) if is_self_attention(call) else real.new_zeros(batch, dtype=torch.int64)
    sink = _strongest_keys(rows.argmax, rows.peak(), several, keys, first)
    output = measure_output(call, real if shown is None else real & shown)
    statistics, scaling = HeadStats.from_rows(rows, shown), measure_call(call, output.scale)
    orders = run_orders(call, rows, counted) if keys else None
    return Reduced(place, statistics, call.scale, scaling, figures, sink, call.mismatch, output, orders)


def read_back(reduced: Reduced, *, in_causal_part: bool) -> CallEvidence:
    """The call's evidence, on the CPU."""
    figures = {name: value.cpu() for name, value in reduced.figures.items()}
    sink = {name: value.cpu() for name, value in reduced.sink.items()}
    total = sink["counted"].clamp(min=1).double()
    scale = reduced.scale
    return CallEvidence(
        **reduced.place,
        stats=on_cpu(reduced.stats),
        largest_logit=figures["largest_logit"],
        largest_logit_centred=figures["largest_logit_centred"],
        scale=scale.detach().cpu() if isinstance(scale, Tensor) else scale,
        in_causal_part=in_causal_part,
        future_heads=tuple(torch.nonzero(figures["sees_future"]).flatten().tolist()),
        near_heads=tuple(torch.nonzero(figures["near"]).flatten().tolist()) if "near" in figures else (),
        ahead=Ahead(*(int(figures[name]) for name in ("pairs", "query", "key"))) if "near" in figures else Ahead(),
        sees_padding=bool(figures["sees_padding"]),
        masked_rows=figures["masked_rows"],
        real_rows=int(figures["real_rows"]),
        dead=figures["dead"].double() / figures["several"].clamp(min=1),
        previous=figures["previous"].double() / figures["behind_first"].clamp(min=1),
        sink=KeyShare(sink["key"], sink["rows"] / total, sink["weight"].double() / total, sink["at_start"]),
        scaling=reduced.scaling,
        shown=reduced.shown,
        orders=() if reduced.orders is None else read_orders(reduced.orders),
    )


def misread(reduced: Reduced) -> Misread | None:
    """What is known of a call that does not hold; None where it holds or nothing is."""
    scaling = None if reduced.holds else reduced.scaling.by_regression()
    return scaling and Misread(reduced.place["module"], reduced.place["call"], scaling)


def on_cpu(stats: HeadStats) -> HeadStats:
    """The same record on the CPU."""
    histograms = {name: value.cpu() for name, value in stats.histograms.items()}
    return HeadStats(stats.counts.cpu(), stats.extremes.cpu(), stats.sums.cpu(), histograms)


def _strongest_keys(argmax: Tensor, peak: Tensor, counted: Tensor, keys: int, first: Tensor) -> dict[str, Tensor]:
    """For each sequence and head, the key that is the strongest of most rows; summed over the sequences.

    argmax, peak, counted: [batch, heads, queries]; first: [batch], the first real position of each sequence.
    """
    index = argmax.clamp(min=0, max=max(keys - 1, 0))
    votes = torch.zeros(*index.shape[:-1], max(keys, 1), dtype=torch.int64, device=index.device)
    votes.scatter_add_(-1, index, counted.long())
    rows, key = votes.max(-1)
    on_key = counted & (index == key.unsqueeze(-1))
    fullest = rows.argmax(0)
    return {
        "key": key.gather(0, fullest.unsqueeze(0)).squeeze(0),
        "rows": rows.sum(0),
        "weight": torch.where(on_key, peak.double(), 0.0).sum((0, -1)),
        "counted": counted.sum((0, -1)),
        "at_start": (key == first.unsqueeze(-1)).all(0),
    }


def _previous(argmax: Tensor, several: Tensor, own: bool) -> dict[str, Tensor]:
    """For each head, how many rows have the position before their own as their strongest key, and of how many."""
    position = torch.arange(argmax.shape[-1], device=argmax.device)
    behind = several & (position > 0) & own
    return {
        "previous": _by_head(behind & (argmax == position - 1)).sum(-1),
        "behind_first": _by_head(behind).sum(-1),
    }


def _ahead(call: AttentionCall, real: Tensor) -> dict[str, Tensor]:
    return looks_ahead(call, real) if is_self_attention(call) else {}


def _by_head(values: Tensor) -> Tensor:
    """[batch, heads, queries] to [heads, batch·queries]."""
    return values.movedim(-2, 0).flatten(1)
