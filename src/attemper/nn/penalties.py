"""Penalties on the logits of attention, from the record that comes with the output: no matrix of weights is written down.

They flow back through `lse` and `entropy` alone, which every kernel differentiates.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from attemper.errors import ArgumentError
from attemper.stats import RowStats, broadcasts_to


def z_loss(rows: RowStats, query_mask: Tensor | None = None, head_weights: Tensor | None = None) -> Tensor:
    """Mean of lse² over the rows: holds log Σ eᶻ near 0, and with it the logits.

        loss = loss + 1e-4 * attemper.nn.z_loss(rows)

    Rows with at most one visible key are left out: they say nothing about the softmax. lse is at least ln n where the mean of
    the n logits is 0, so that the penalty of a uniform row is (ln n)²: what it pushes down first is a common offset, which the
    softmax ignores and 16-bit logits do not.

    Args:
        rows: of `attemper.attention(…, return_stats=True)`, [..., heads, queries].
        query_mask: bool [batch, queries] (or anything that broadcasts to [..., queries]), True where the query is a real token.
        head_weights: [heads], a factor on the rows of each head; None: 1.

    Returns:
        A 0-d tensor, float32 (float64 where the record is); 0 where no row is left.

    Raises:
        ArgumentError: an argument does not fit the record.

    Source: on the output logits of a model Chowdhery et al. 2022 (PaLM, arXiv 2204.02311), section 5, with 1e-4; on a router's
    Zoph et al. 2022 (ST-MoE, arXiv 2202.08906), section 3.3. On the logits of attention it is ours.
    """
    return z_loss_of(counted(rows, query_mask), head_weights)


def entropy_floor(
    rows: RowStats,
    floor: float,
    query_mask: Tensor | None = None,
    head_weights: Tensor | None = None,
    *,
    normalized: bool = True,
) -> Tensor:
    """Mean of max(0, floor − H / ln n)² over the rows: holds their entropy above a floor, and leaves alone what is above it.

        loss = loss + 1e-2 * attemper.nn.entropy_floor(rows, 0.1)

    n is the number of visible keys, and one more with a sink; rows with at most one visible key are left out. The gradient of H
    dies with the softmax's own: a head that is one-hot already is not brought back.

    Args:
        rows, query_mask, head_weights: as in `z_loss`: a record of [..., heads, queries], [batch, queries], and [heads].
        floor: in [0, 1] a share of the entropy of a uniform row; with normalized=False in nats, from 0 on.
        normalized: whether H is divided by ln n.

    Returns:
        A 0-d tensor, float32 (float64 where the record is); 0 where no row is left.

    Raises:
        ArgumentError: an argument does not fit the record, or the floor is out of its range.

    Source: that entropy collapses before a run diverges is Zhai et al. 2023 (arXiv 2303.06296); a loss on entropies past a
    threshold is Jha and Reagen 2025 (arXiv 2501.03489), who bound them from above. The floor is ours.
    """
    check_floor("floor", floor, normalized)
    return entropy_floor_of(counted(rows, query_mask), floor, head_weights, normalized)


class CountedRows(NamedTuple):
    """What the penalties need of a record.

    Attributes:
        lse, entropy: [..., heads, queries], with their gradients.
        count: visible keys of each row, 0 where it is padding; as floats.
        sink: whether a sink takes weight too.
    """

    lse: Tensor
    entropy: Tensor
    count: Tensor
    sink: bool


@torch.no_grad()
def _real(count: Tensor, query_mask: Tensor) -> Tensor:
    per_query = (*count.shape[:-2], count.shape[-1])
    if query_mask.dtype != torch.bool or not broadcasts_to(query_mask.shape, per_query):
        given = f"{query_mask.dtype} of shape {tuple(query_mask.shape)}"
        raise ArgumentError("query_mask", given, f"bool, broadcastable to {per_query}")
    return torch.where(query_mask.to(count.device).expand(per_query).unsqueeze(-2), count, 0.0)


def counted(rows: RowStats, query_mask: Tensor | None) -> CountedRows:
    """What is kept of a record until its penalty is asked for."""
    if not isinstance(rows, RowStats):
        raise ArgumentError("rows", type(rows).__name__, "the RowStats of attention(..., return_stats=True)")
    count = rows.rest[0].detach()
    return CountedRows(rows.lse, rows.entropy, count if query_mask is None else _real(count, query_mask), rows.sink)


def z_loss_of(rows: CountedRows, head_weights: Tensor | None) -> Tensor:
    """`z_loss` of what was kept."""
    return _mean(rows, torch.where(rows.count > 1, rows.lse, 0.0).square(), head_weights)


def entropy_floor_of(rows: CountedRows, floor: float, head_weights: Tensor | None, normalized: bool) -> Tensor:
    """`entropy_floor` of what was kept."""
    entropy = rows.entropy
    if normalized:
        choices = rows.count + 1.0 if rows.sink else rows.count
        entropy = entropy / torch.log(choices.clamp(min=2.0))
    return _mean(rows, torch.relu(floor - torch.where(rows.count > 1, entropy, floor)).square(), head_weights)


def check_floor(argument: str, floor: float, normalized: bool) -> None:
    """Raise unless it is a number in its range."""
    number = isinstance(floor, int | float) and not isinstance(floor, bool)
    if not number or not 0.0 <= floor <= (1.0 if normalized else math.inf) or math.isinf(floor):
        expected = "a number in [0, 1], a share of ln n" if normalized else "a finite number from 0 on, in nats"
        raise ArgumentError(argument, repr(floor), expected)


def _mean(rows: CountedRows, penalties: Tensor, head_weights: Tensor | None) -> Tensor:
    several = rows.count > 1
    if head_weights is not None:
        heads = penalties.shape[-2]
        if not isinstance(head_weights, Tensor) or head_weights.shape != (heads,):
            shape = list(head_weights.shape) if isinstance(head_weights, Tensor) else type(head_weights).__name__
            raise ArgumentError("head_weights", shape, f"a tensor [heads] with {heads} heads")
        penalties = penalties * head_weights.to(penalties).unsqueeze(-1)
    return torch.where(several, penalties, 0.0).sum() / several.sum().clamp(min=1)
