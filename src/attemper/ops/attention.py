"""The public functions: `attention`, and `row_stats` for its statistics alone."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import Tensor

from attemper.errors import ArgumentError
from attemper.ops.arguments import Problem, Window, check
from attemper.ops.differentiation import Attention, without_autocast
from attemper.ops.implementations import choose
from attemper.stats import RowStats

# Told of every call of `attention` once it is done: the problem, and the scale as it was given. Capture listens here.
LISTENERS: list[Callable[[Problem, float | Tensor | None], None]] = []


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | Tensor | None = None,
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
    scale: float | Tensor | None = None,
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
    scale: float | Tensor | None = None,
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
        scale: None (1/√d), a number, a 0-d tensor, a 1-D tensor of one factor a head, or a tensor that broadcasts to
            [..., heads, queries]. Tensors get gradients and are used in float32, unrounded.
        enable_gqa: let kv_heads be a divisor of heads; head h reads key head h // (heads / kv_heads).
        softcap: bound on |scale·q·k|, above 0, in units of a logit (Gemma 2, arXiv 2408.00118, section 2).
        sinks: [heads], logits that take weight and have no value (gpt-oss; Xiao et al. 2023, arXiv 2309.17453).
        window: (left, right): i + offset − left ≤ j ≤ i + offset + right; None on a side: no limit.
        offset: position of query 0 among the keys: 0 aligns top-left, keys − queries is right for decoding.
        return_stats: also return the record of the logits.
        impl: "auto", "reference", "blocked", "cpu" or "triton"; a named one never falls back to another.

    Returns:
        The output, [..., heads, queries, d_v] in the dtype of query; with `return_stats` the pair (output, `RowStats` of shape
        [..., heads, queries]). Output, lse and entropy are differentiable, once.

    Raises:
        ArgumentError: an argument does not fit; the message names it. UnsupportedError: `impl` is not available here.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.1; the record: docs/statistics.md.
    """
    if not isinstance(value, Tensor):
        raise ArgumentError("value", type(value).__name__, "a torch.Tensor")
    query, key, value = _autocast(query), _autocast(key), _autocast(value)
    options: dict[str, Any] = {
        "scale": scale,
        "enable_gqa": enable_gqa,
        "softcap": softcap,
        "sinks": sinks,
        "window": window,
        "offset": offset,
    }
    problem = check(query, key, value, attn_mask, dropout_p, is_causal, **options)
    output, rows = _run(problem, impl, statistics=return_stats)
    assert output is not None
    for tell in LISTENERS:
        tell(problem, scale)
    if not return_stats:
        return output
    return output, rows


def row_stats(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window: Window | None = None,
    offset: int = 0,
    impl: str = "auto",
) -> RowStats:
    """The record of the logits alone: no values are read, no gradient is kept. Key may have fewer heads than query.

    Args and errors: as in `attention`.

    Returns:
        `RowStats` of shape [..., heads, queries].
    """
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks, "window": window, "offset": offset}
    with torch.no_grad():
        query, key = _autocast(query), _autocast(key)
        problem = check(query, key, None, attn_mask, 0.0, is_causal, enable_gqa=True, **options)
        return _run(problem, impl, statistics=True)[1]


def _run(problem: Problem, impl: str, *, statistics: bool) -> tuple[Tensor | None, RowStats]:
    if not torch.compiler.is_compiling():
        return _run_eagerly(problem, impl, statistics=statistics)
    if not _BREAKS_THE_GRAPH:
        _BREAKS_THE_GRAPH.append(torch.compiler.disable(_run_eagerly, reason="the kernels are not registered operators yet"))
    return _BREAKS_THE_GRAPH[0](problem, impl, statistics=statistics)


# `_run_eagerly` as the compiler must see it, made when it first does: as a decorator, torch.compiler.disable would load the
# compiler, for seconds, at every import of attemper.
_BREAKS_THE_GRAPH: list[Any] = []


def _run_eagerly(problem: Problem, impl: str, *, statistics: bool) -> tuple[Tensor | None, RowStats]:
    inputs, rules = problem.inputs, problem.rules
    kernel = choose(impl, inputs)
    if rules.dropout_p > 0.0:
        # On the CPU whatever the default device is: the seed is a number of this process.
        rules = replace(rules, seed=int(torch.randint(2**63 - 1, (), device="cpu")))
    with without_autocast(inputs.query.device):
        output, lse, entropy, rest = Attention.apply(kernel, rules, statistics, *inputs)
    record = RowStats(
        problem.restore(lse),
        problem.restore(entropy),
        lse.new_empty(0) if rest is None else problem.restore(rest, before=1),
        sink=inputs.sinks is not None,
    )
    return None if output is None else problem.restore(output), record


def _autocast(tensor: Tensor) -> Tensor:
    """Under autocast, the tensor in autocast's dtype, as for torch's own attention."""
    if not isinstance(tensor, Tensor) or not tensor.dtype.is_floating_point or tensor.dtype == torch.float64:
        return tensor
    device = tensor.device.type
    active = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return tensor.to(torch.get_autocast_dtype(device)) if active else tensor
