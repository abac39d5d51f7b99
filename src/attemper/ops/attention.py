"""The public functions: `attention`, and `row_stats` for its statistics alone."""

from typing import Literal, overload

import torch
from torch import Tensor

from attemper.errors import ArgumentError
from attemper.ops.arguments import Window, check, every
from attemper.ops.listening import LISTENERS, rows_wanted, tell
from attemper.ops.running import run, run_plainly
from attemper.scales.base import Scale
from attemper.stats import RowStats


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | Tensor | Scale | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window: Window | None = None,
    offset: int = 0,
    return_stats: Literal[False] = False,
    impl: str = "auto",
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | Tensor | Scale | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window: Window | None = None,
    offset: int = 0,
    return_stats: Literal[True],
    impl: str = "auto",
) -> tuple[Tensor, RowStats]: ...


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | Tensor | Scale | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window: Window | None = None,
    offset: int = 0,
    return_stats: bool = False,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, RowStats]:
    """Scaled dot-product attention, softmax(z) v, and on request the exact statistics of its logits z.

    z = scale·q·kᵀ + mask, with a softcap z = softcap·tanh(scale·q·kᵀ / softcap) + mask. The positional arguments are those of
    `torch.nn.functional.scaled_dot_product_attention`, with its meanings. Products accumulate in float32 (float64 for float64)
    and the scale is applied in float32. A row without any visible key gives output 0 and gradient 0.

    Args:
        query: [..., heads, queries, d], float32, float64, bfloat16 or float16; dimension −3 is always heads.
        key: [..., kv_heads, keys, d], value: [..., kv_heads, keys, d_v], dtype and device of query; d_v may differ from d.
        attn_mask: broadcastable to [..., heads, queries, keys]. Bool: True = take part. Float: added to the logits after the
            scale; −inf, or a value at or below half the most negative number of its dtype, hides the pair.
        dropout_p: probability in [0, 1] with which each weight is dropped, always applied: pass 0.0 in evaluation. The seed is
            drawn from torch's generator.
        is_causal: key j is visible to query i at j ≤ i + offset; with a mask, both apply.
        scale: None (1/√d), a number, a 0-d tensor, a 1-D tensor of one factor a head, a tensor that broadcasts to
            [..., heads, queries], or a rule of `attemper.scales`. Tensors, and what a rule has learned, get gradients and are
            used in float32, unrounded.
        enable_gqa: let kv_heads be a divisor of heads; head h reads key head h // (heads / kv_heads).
        softcap: bound on |scale·q·k|, above 0, in units of a logit (Gemma 2, arXiv 2408.00118, section 2).
        sinks: [heads], logits that take weight and have no value (gpt-oss; Xiao et al. 2023, arXiv 2309.17453).
        window: (left, right): i + offset − left ≤ j ≤ i + offset + right; None on a side: no limit.
        offset: position of query 0 among the keys: 0 aligns top-left, keys − queries is right for decoding.
        return_stats: also return the record of the logits.
        impl: "auto", "reference", "blocked", "cpu" or "triton"; a named one never falls back to another.

    Returns:
        The output, [..., heads, queries, d_v] in the dtype of query; with `return_stats` the pair (output, `RowStats` of shape
        [..., heads, queries]). Output, lse and entropy are differentiable, once. The kernel `cpu` lays the output out as the
        query is, and gradients as their inputs: what a projection's view and transpose made goes back without a copy.

    Raises:
        ArgumentError: an argument does not fit; the message names it. UnsupportedError: `impl` is not available here.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.1; the record: docs/statistics.md.
    """
    if attn_mask is scale is softcap is sinks is window is None and dropout_p == 0.0 and offset == 0 and not LISTENERS:
        found = run_plainly(query, key, value, is_causal, return_stats, impl)
        if found is not None:
            return found
    if not isinstance(value, Tensor):
        raise ArgumentError("value", type(value).__name__, "a torch.Tensor")
    problem = check(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        softcap=softcap,
        sinks=sinks,
        window=window,
        offset=offset,
    )
    output, rows = run(problem, impl, statistics=return_stats or (bool(LISTENERS) and rows_wanted()))
    assert output is not None
    tell(problem, rows, shared=return_stats)
    return (output, rows) if return_stats and rows is not None else output


def row_stats(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | Tensor | Scale | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window: Window | None = None,
    offset: int = 0,
    row_stride: int = 1,
    impl: str = "auto",
) -> RowStats:
    """The record of the logits alone: no values are read, no gradient is kept. Key may have fewer heads than query.

    Args and errors: as in `attention`, and

        row_stride: only queries 0, row_stride, 2·row_stride, … are looked at, each at its own position; the cost falls with them.

    Returns:
        `RowStats` of shape [..., heads, ⌈queries / row_stride⌉].
    """
    with torch.no_grad():
        problem = check(
            query,
            key,
            None,
            attn_mask,
            0.0,
            is_causal,
            scale=scale,
            enable_gqa=True,
            softcap=softcap,
            sinks=sinks,
            window=window,
            offset=offset,
        )
        rows = run(every(problem, row_stride), impl, statistics=True)[1]
    assert rows is not None
    return rows
