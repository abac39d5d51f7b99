"""`ring_attention`: attention over a sequence that is shared out over the ranks of a process group.

What it must hold:
- the result, every gradient and every statistic are those of `attemper.attention` on the whole sequence;
- a rank holds its own part of q, k, v and of the output, and one travelling part of k and v: memory in proportion to N·d / ranks;
- every rank takes part in every step, whatever it sees or wants, or the others would wait for ever.

Keys and values go around the ring; each rank attends to what passes and joins the parts by `attemper.merge`. In the backward
pass they go around again, each part is computed once more, and their gradients travel with them. Parts are computed in float32
(float64 for float64), so that what adds up over them is rounded to 16 bits once, at the end. They are merged in float64: the
shares of the parts in the two passes must agree by more than float32 knows of a large lse, or what should cancel between the
parts of a row does not.
"""

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from attemper.errors import ArgumentError
from attemper.kernels.spec import Needs
from attemper.nn.ring_parts import Parts, Whole
from attemper.nn.ring_travel import Passing, Ring
from attemper.nn.sequence_parts import Run, check_layout, runs
from attemper.ops import Window, without_autocast
from attemper.ops.arguments import check
from attemper.ops.implementations import KERNELS, Kernel, choose
from attemper.scales.base import LogitShape, Scale
from attemper.stats import RowStats, merge


@overload
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool = False,
    *,
    scale: float | Tensor | Scale | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window: Window | None = None,
    offset: int = 0,
    layout: str = "contiguous",
    lengths: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    return_stats: Literal[False] = False,
    impl: str = "auto",
) -> Tensor: ...


@overload
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool = False,
    *,
    scale: float | Tensor | Scale | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window: Window | None = None,
    offset: int = 0,
    layout: str = "contiguous",
    lengths: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    return_stats: Literal[True],
    impl: str = "auto",
) -> tuple[Tensor, RowStats]: ...


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool = False,
    *,
    scale: float | Tensor | Scale | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window: Window | None = None,
    offset: int = 0,
    layout: str = "contiguous",
    lengths: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    return_stats: bool = False,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, RowStats]:
    """`attemper.attention` over a sequence of which each rank of a process group holds a part: softmax(z) v, with all keys in z.

    z = scale·q·kᵀ (capped), as in `attemper.attention`, whose arguments these are, for the positions that this rank holds. A
    collective, forward and backward: every rank of the group calls it, and goes backward through it, equally often and in the
    same order. There is no mask beside the causal rule and the window, and no dropout.

    Args:
        query: [..., heads, queries, d], the positions of this rank; key: [..., kv_heads, keys, d]; value: [..., kv_heads, keys,
            d_v]. Ranks may hold different numbers of them, also none; all other dimensions are the same on all.
        is_causal, enable_gqa, softcap, window: as in `attemper.attention`, the same on every rank.
        scale: as there; a tensor that differs by query has the queries of this rank, a rule is asked for their positions.
        sinks: [heads], the same on every rank; merged once, last.
        offset: position of query 0 of the whole sequence among all keys.
        layout: "contiguous": rank after rank; "zigzag": as `ring_shard` cuts it, so that a causal mask leaves all ranks the
            same work.
        lengths: how many positions each rank holds, for queries and keys alike; None: they are exchanged, and the host waits.
        group: the ranks of the ring, in their order; None: all.
        return_stats: also return the record of the logits; `argmax` counts over all keys.
        impl: the kernel that computes a part, as in `attemper.attention`.

    Returns:
        The output, [..., heads, queries, d_v] in the dtype of query; with `return_stats` the pair (output, `RowStats` of shape
        [..., heads, queries]). Output, lse and entropy are differentiable, once. The gradients of sinks and of a scale are those
        that come from this rank's queries: they add up over the ranks, as those of any parameter do.

    Raises:
        ArgumentError: an argument does not fit; the message names it. UnsupportedError: `impl` is not available here.

    Source: Liu et al. 2023 (arXiv 2310.01889), section 3; the merge: Milakov and Gimelshein 2018 (arXiv 1805.02867).
    """
    if not isinstance(value, Tensor):
        raise ArgumentError("value", type(value).__name__, "a torch.Tensor")
    check_layout(layout)
    ring = Ring(group)
    of_rule = scale if isinstance(scale, Scale) else None
    problem = check(
        query,
        key,
        value,
        is_causal=is_causal,
        scale=None if of_rule is not None else scale,
        enable_gqa=enable_gqa,
        softcap=softcap,
        sinks=sinks,
        window=window,
        offset=offset,
    )
    queries, keys = query.shape[-2], key.shape[-2]
    counts = ring.lengths(queries, keys, query.device) if lengths is None else _told(lengths, ring, queries, keys)
    of_queries, of_keys = (runs(each, layout) for each in zip(*counts, strict=True))
    parts = Parts(ring, of_queries[ring.rank], of_keys, problem.rules)
    if of_rule is not None:
        factor = _factor_of(of_rule, query, parts)
        problem = check(query, key, value, scale=factor, enable_gqa=enable_gqa, sinks=sinks)._replace(rules=problem.rules)
    kernel = KERNELS[choose(impl, problem.inputs, seen=True)]
    q, k, v, _, factors, sink = problem.inputs
    output, lse, entropy, rest = _RingAttention.apply(parts, kernel, q, k, v, factors, sink)
    output = problem.restore(output)
    return (output, problem.record(lse, entropy, rest)) if return_stats else output


def _told(lengths: Sequence[int], ring: Ring, queries: int, keys: int) -> list[tuple[int, int]]:
    if len(lengths) != ring.size or not queries == keys == lengths[ring.rank]:
        expected = (
            f"{ring.size} numbers, one a rank, of which number {ring.rank} is this rank's {queries} queries and {keys} keys"
        )
        raise ArgumentError("lengths", list(lengths), expected)
    return [(length, length) for length in lengths]


def _factor_of(rule: Scale, query: Tensor, parts: Parts) -> float | Tensor:
    """What a rule answers for the positions of this rank."""
    heads, _, width = query.shape[-3:]
    keys, offset = sum(run.length for of_rank in parts.keys for run in of_rank), parts.rules.offset

    def of(run: Run) -> float | Tensor:
        return rule.factor(LogitShape(width, heads, run.length, keys, run.start + offset, device=query.device))

    found = [of(run) for run in parts.queries]
    per_query = [
        factor.expand(*factor.shape[:-1], run.length)
        for factor, run in zip(found, parts.queries, strict=True)
        if isinstance(factor, Tensor) and factor.ndim > 1
    ]
    return torch.cat(per_query, -1) if per_query else found[0]


class _RingAttention(torch.autograd.Function):
    """(parts, kernel, query, key, value, scale, sinks) → (output, lse, entropy, rest) of this rank's queries."""

    @staticmethod
    def forward(
        ctx: Any, parts: Parts, kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, scale: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Attend to what passes, and merge."""
        found = [_nothing(query, value, run) for run in parts.queries]
        with without_autocast(query.device):
            held: Sequence[Tensor] = (key, value)
            for step in range(parts.ring.size):
                onwards = parts.pass_on(held, step)
                for place, keys, inputs, rules in parts.meetings(step, query, held, scale):
                    result = kernel.forward(inputs, rules, statistics=True, differentiable=False)
                    assert result.output is not None
                    assert result.rest is not None
                    rows = RowStats(result.lse.double(), result.entropy.double(), result.rest.double())
                    found[place] = merge(found[place], (result.output.double(), rows.with_key_offset(keys.start)))
                held = held if onwards is None else onwards.wait()
            if sinks is not None:
                found = [
                    merge((one, rows), (torch.zeros_like(one), RowStats.from_sink(sinks.double(), tuple(rows.lse.shape))))
                    for one, rows in found
                ]
        output = torch.cat([one.to(scale.dtype) for one, _ in found], -2)
        lse, entropy, rest = (torch.cat([getattr(rows, name) for _, rows in found], -1) for name in ("lse", "entropy", "rest"))
        ctx.parts, ctx.kernel = parts, kernel
        ctx.save_for_backward(query, key, value, scale, sinks, output, lse, entropy)
        ctx.set_materialize_grads(False)
        # Copies: the caller may write to what he gets, and what is saved must stay.
        rest = rest.to(scale.dtype)
        ctx.mark_non_differentiable(rest)
        return output.to(query.dtype, copy=True), lse.to(scale.dtype, copy=True), entropy.to(scale.dtype, copy=True), rest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyrefly: ignore[bad-override]
        """Meet what passes again, and send its gradients on with it."""
        query, key, value, scale, sinks, *results = ctx.saved_tensors
        parts, kernel, dtype = ctx.parts, ctx.kernel, scale.dtype
        whole = Whole(*results, *(None if each is None else each.to(dtype) for each in grad_outputs[:3]))
        # Gradients travel whoever wants them: another rank may.
        needs = Needs(query=True, key=True, value=True, mask=False, scale=ctx.needs_input_grad[5], sinks=False)
        d_query, d_scale = torch.zeros_like(query, dtype=dtype), torch.zeros_like(scale)
        with torch.no_grad(), without_autocast(query.device):
            held: Sequence[Tensor] = (key, value)
            arriving: Passing | None = None
            for step in range(parts.ring.size):
                onwards = parts.pass_on(held, step)
                d_key, d_value = (torch.zeros_like(each, dtype=dtype) for each in held)
                for place, keys, inputs, rules in parts.meetings(step, query, held, scale):
                    here = parts.queries[place].slice
                    # Of the statistics the entropy alone is wanted, and only where something flows into it.
                    statistics = whole.d_entropy is not None
                    result = kernel.forward(inputs, rules, statistics=statistics, differentiable=True)
                    gradients = kernel.backward(inputs, rules, result, whole.upstream(result, here), needs)
                    d_query[..., here, :] += gradients.query
                    d_key[..., keys.slice, :] += gradients.key
                    d_value[..., keys.slice, :] += gradients.value
                    if gradients.scale is not None:
                        of_run = d_scale if scale.shape[-1] == 1 else d_scale[..., here]
                        of_run += gradients.scale
                if arriving is not None:
                    for own, before in zip((d_key, d_value), arriving.wait(), strict=True):
                        own += before
                arriving = parts.send_after([d_key, d_value], step)
                held = held if onwards is None else onwards.wait()
            assert arriving is not None
            d_key, d_value = arriving.wait()
            d_sinks = whole.of_sinks(sinks) if ctx.needs_input_grad[6] else None
        of_inputs = (d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype))
        return None, None, *of_inputs, d_scale if needs.scale else None, d_sinks


def _nothing(query: Tensor, value: Tensor, run: Run) -> tuple[Tensor, RowStats]:
    """The neutral element of `merge` for a run of queries, in float64."""
    shape = (*query.shape[:2], run.length)
    output = query.new_zeros(*shape, value.shape[-1], dtype=torch.float64)
    return output, RowStats.empty(shape, dtype=torch.float64, device=query.device)
