"""One entry for each attention call from several inputs: statistics merge, extremes are the largest, counts add up."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import torch

from attemper.checker.evidence import CallEvidence


def over_inputs(by_input: Sequence[Sequence[CallEvidence]]) -> tuple[CallEvidence, ...]:
    """The calls of all inputs, in the order of the first that made each; of one input, its own."""
    if len(by_input) == 1:
        return tuple(by_input[0])
    grouped: dict[tuple[str, int], list[CallEvidence]] = {}
    for calls in by_input:
        for call in calls:
            grouped.setdefault((call.module, call.call), []).append(call)
    return tuple(reduce(_both, group) for group in grouped.values())


def _both(first: CallEvidence, second: CallEvidence) -> CallEvidence:
    if first.heads != second.heads:  # a module that cuts its batch into heads: nothing is the same head in both
        return first
    higher = second.largest_logit > first.largest_logit
    return replace(
        first,
        queries=max(first.queries, second.queries),
        keys=max(first.keys, second.keys),
        stats=first.stats.merge(second.stats),
        largest_logit=torch.where(higher, second.largest_logit, first.largest_logit),
        largest_logit_centred=torch.where(higher, second.largest_logit_centred, first.largest_logit_centred),
        future_heads=tuple(sorted({*first.future_heads, *second.future_heads})),
        near_heads=tuple(sorted({*first.near_heads, *second.near_heads})),
        ahead=max(first.ahead, second.ahead, key=lambda ahead: ahead.pairs),
        sees_padding=first.sees_padding or second.sees_padding,
        masked_rows=first.masked_rows + second.masked_rows,
        real_rows=first.real_rows + second.real_rows,
    )
