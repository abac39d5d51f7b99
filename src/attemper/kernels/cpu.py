"""The compiled kernel: C++ from csrc/, built for several instruction sets, chosen when it is loaded.

This side allocates and checks nothing but whether the extension is here; the arguments were checked above. A problem crosses as
one packed record of addresses, sizes and strides (csrc/problem.h); no tensor library is linked.
"""

import functools
import math
import os
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from attemper.errors import UnsupportedError
from attemper.kernels.spec import Forward, Gradients, Inputs, Needs, Rules, Upstream, invisible_below

try:
    from attemper.kernels import _cpu
except ImportError:
    _cpu = None

_ISA_VARIABLE = "ATTEMPER_CPU_ISA"
_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3, torch.bool: 4}
_UNLIMITED = 2**63 - 1
_NO_VIEW = (0, 0, 0, 0, 0)
_RECORD = struct.Struct("=70q3d")
# The same record in bytes, around the addresses of query, key, value, and output, lse, entropy and rest.
_AROUND_ADDRESSES = struct.Struct("=72sq32sq32sq176s4q216s")

# Where few heads would leave threads idle, the keys are dealt to this many units. It follows from the shape alone, so that
# results do not depend on the number of threads.
_UNITS_WANTED = 8
_MOST_SPLITS = 4
_MOST_BYTES_OF_SPLITS = 8 * 2**20
_TILE_KEYS = 128


# Not empty in a child of a fork.
_FORKED: list[bool] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _FORKED.append(True))


def available() -> bool:
    """Whether the extension was built and can run here."""
    return _cpu is not None


def refusal(inputs: Inputs) -> str:
    """What the kernel does not take of these tensors, "" if it takes them all: it reads plain memory of this process."""
    for tensor in inputs:
        if tensor is None:
            continue
        if not tensor.is_cpu:
            return f"a tensor on {tensor.device}"
        if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:
            return f"a {type(tensor).__name__}"
        if tensor.is_neg():
            return "a tensor whose sign is yet to be turned (see torch.Tensor.resolve_neg)"
        if tensor._is_zerotensor():
            return "a tensor of noughts without memory (torch._efficientzerotensor)"
    return ""


def describe() -> str:
    """What is here, in a few words: the instruction set in use, which ATTEMPER_CPU_ISA overrides, or why there is none."""
    if _cpu is None:
        return "compiled C++; not built here: reinstall with pip install -v to see why"
    return f"compiled C++, {_cpu.instruction_set()}, memory in proportion to the length"


def rounds_weights() -> bool:
    """Whether the build in use rounds weights to bfloat16 before they meet values of bfloat16."""
    return _cpu is not None and _cpu.rounds_weights()


def _choose() -> None:
    wanted = os.environ.get(_ISA_VARIABLE, "")
    if _cpu is not None and not _cpu.choose_instruction_set(wanted):
        raise UnsupportedError(
            f"{_ISA_VARIABLE}: got {wanted!r}; expected avx512bf16, avx512, avx2, neon or portable, "
            "as far as this processor has it"
        )


_choose()


class _Figures(NamedTuple):
    """Row figures of the forward pass that the backward pass wants; see RowTerms in csrc/backward.h."""

    pivot: Tensor
    peak: Tensor
    surprise: Tensor
    sink: Tensor
    product_pivot: Tensor


FIGURES = len(_Figures._fields)


def forward(inputs: Inputs, rules: Rules, *, statistics: bool, differentiable: bool) -> Forward:
    """softmax(z) v and the record of z."""
    batch, heads, queries, _ = inputs.query.shape
    scale, dtype = inputs.scale, inputs.scale.dtype
    output = None if inputs.value is None else inputs.query.new_empty(batch, heads, queries, inputs.value.shape[-1])
    lse, entropy = scale.new_empty(batch, heads, queries), scale.new_empty(batch, heads, queries)
    rest = scale.new_empty(10, batch, heads, queries) if statistics else None
    figures = scale.new_empty(FIGURES, batch, heads, queries) if differentiable else None
    # The backward pass wants the output unrounded: D = Σ o·do would inherit its rounding.
    unrounded = None
    if differentiable and output is not None and output.dtype != dtype:
        unrounded = torch.empty_like(output, dtype=dtype)
    if lse.numel():
        outputs = (_address(output), lse.data_ptr(), entropy.data_ptr(), _address(rest), _address(unrounded))
        *kept, product_pivot = (0,) * FIGURES if figures is None else (each.data_ptr() for each in figures)
        _run("forward", inputs, rules, statistics, (*outputs, *kept), (0, 0, product_pivot, 0))
    return Forward(output, lse, entropy, rest, figures, unrounded)


def plain(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, statistics: bool) -> tuple[Tensor, ...] | None:
    """`forward` of three ordinary tensors of fitting shapes, of which none requires a gradient; None for any others.

    To the bit the same (output,), and with statistics (output, lse, entropy, rest). With a few rows most of the time of a call
    passes in Python: here as little of it runs as can tell that nothing more is wanted.
    """
    for tensor in (query, key, value):
        if type(tensor) is not Tensor or not tensor.is_cpu or tensor.requires_grad or tensor.is_neg():
            return None
    if not query.dtype is key.dtype is value.dtype:
        return None
    try:
        q, k, v = query.data_ptr(), key.data_ptr(), value.data_ptr()
        strides = query.stride(), key.stride(), value.stride()
    except RuntimeError:  # sparse, opaque and nested tensors lack the one or the other
        return None
    options = (is_causal, statistics, torch.get_num_threads())
    plan = _plan(query.dtype, query.shape, key.shape, value.shape, strides, options)
    if _cpu is None or plan is None or not (q and k and v):  # a tensor of noughts may have no memory
        return None
    shape, head, query_strides, key_strides, value_strides, tail, scale = plan
    output = query.new_empty(*shape)
    if not statistics:
        address = output.data_ptr()
        _cpu.forward(_AROUND_ADDRESSES.pack(head, q, query_strides, k, key_strides, v, value_strides, address, 0, 0, 0, tail))
        return (output,)
    rows = shape[:3]
    results = (output, scale.new_empty(*rows), scale.new_empty(*rows), scale.new_empty(10, *rows))
    addresses = (each.data_ptr() for each in results)
    _cpu.forward(_AROUND_ADDRESSES.pack(head, q, query_strides, k, key_strides, v, value_strides, *addresses, tail))
    return results


class _Plan(NamedTuple):
    """What of a plain call follows from shapes and strides: the shape of the output, and the record around the addresses."""

    shape: tuple[int, ...]
    head: bytes
    query_strides: bytes
    key_strides: bytes
    value_strides: bytes  # and what follows them up to the output
    tail: bytes
    scale: Tensor  # whose address is in the record


@functools.lru_cache(maxsize=256)
def _plan(
    dtype: torch.dtype,
    query: tuple[int, ...],
    key: tuple[int, ...],
    value: tuple[int, ...],
    strides: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
    options: tuple[bool, bool, int],
) -> _Plan | None:
    if dtype not in _CODES or not len(query) == len(key) == len(value) == 4 or 0 in (*query, *key, *value):
        return None
    is_causal, statistics, threads = options
    batch, heads, queries, width = query
    keys, value_width = value[2:]
    if key != (batch, heads, keys, width) or value[:2] != (batch, heads):
        return None
    scale = torch.full((), 1.0 / math.sqrt(width), dtype=torch.float64 if dtype == torch.float64 else torch.float32, device="cpu")
    record = _RECORD.pack(
        *(_CODES[dtype], 0, batch, heads, heads, queries, keys, width, value_width),
        *(0, *strides[0], 0, *strides[1], 0, *strides[2], *_NO_VIEW),
        *(scale.data_ptr(), 0, 0, 0, 0, 0),
        *(0, 1, _UNLIMITED, 0 if is_causal else _UNLIMITED, 0, threads, int(statistics)),
        *(0,) * 9,
        *(*_NO_VIEW, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1),
        *(0.0, 0.0, 0.0),
    )
    head, _, of_query, _, of_key, _, of_value, _, _, _, _, tail = _AROUND_ADDRESSES.unpack(record)
    return _Plan((batch, heads, queries, value_width), head, of_query, of_key, of_value, tail, scale)


def backward(inputs: Inputs, rules: Rules, result: Forward, upstream: Upstream, needs: Needs) -> Gradients:
    """The gradients that `needs` asks for."""
    threads = torch.get_num_threads()
    if _FORKED and threads > 1:  # torch's own loops over many numbers would wait for threads that did not survive the fork
        torch.set_num_threads(1)
        try:
            return _backward(inputs, rules, result, upstream, needs)
        finally:
            torch.set_num_threads(threads)
    return _backward(inputs, rules, result, upstream, needs)


def _backward(inputs: Inputs, rules: Rules, result: Forward, upstream: Upstream, needs: Needs) -> Gradients:
    assert result.figures is not None
    kept, dtype = _Figures(*result.figures), inputs.compute_dtype
    output = result.output if result.unrounded is None else result.unrounded
    output = None if output is None else output.contiguous()
    batch, heads, queries, keys = inputs.shape
    kv_heads, width = inputs.key.shape[1], inputs.query.shape[-1]
    constant = torch.zeros_like(result.lse)
    of_lse = None if upstream.lse is None else upstream.lse.to(dtype).contiguous()
    entropy = None if upstream.entropy is None else upstream.entropy.to(dtype).contiguous()

    splits = _splits(batch * kv_heads, keys, batch * heads * queries * width * dtype.itemsize)
    stored = inputs.query.dtype

    make = torch.empty if result.lse.numel() else torch.zeros

    def empty(need: bool, dtype: torch.dtype, *shape: int) -> Tensor | None:
        return make(shape, dtype=dtype, device="cpu") if need else None

    d_query = empty(needs.query, stored if splits == 1 else dtype, splits, batch, heads, queries, width)
    d_key = empty(needs.key, stored, *inputs.key.shape)
    d_value = empty(needs.value, stored, *inputs.value.shape) if inputs.value is not None else None
    # Weights of bfloat16 may have been rounded before they met the values, and D = Σ o·do with them. Gradients in float want
    # better: two more sums of the backward pass give D again, and what its error does to the first.
    rounded = stored == torch.bfloat16 and rounds_weights()
    again = rounded and (needs.scale or needs.sinks or needs.mask)
    sums = empty(needs.scale or again, dtype, 3 if rounded else 1, splits, batch, heads, queries)
    d_mask = empty(needs.mask, dtype, *inputs.mask.shape) if inputs.mask is not None else None
    if result.lse.numel():
        # Autograd may hand on a gradient whose sign is yet to be turned; the kernel reads memory.
        flow = None if upstream.output is None else upstream.output.resolve_neg()
        view = _NO_VIEW if flow is None else _view(flow)
        pivot = kept.product_pivot.data_ptr() if _pivoted(inputs, rules) else 0
        kept_rows = tuple(each.data_ptr() for each in kept[:4])

        def gather(of_lse: Tensor | None, output: Tensor | None, *grown: Tensor | None) -> None:
            written = (0, 0, 0, 0, _address(output), *kept_rows)
            flowing = (_address(of_lse), _address(entropy), pivot, constant.data_ptr())
            shape = (1, 1, 1, 1) if d_mask is None else d_mask.shape
            _run("backward", inputs, rules, False, written, flowing, view, splits, tuple(map(_address, grown)), shape)

        gather(of_lse, output, d_query, d_key, d_value, sums, None if again else d_mask)
        if again and sums is not None:
            exact = (0.0 if of_lse is None else of_lse.double()) - sums[1].double().sum(0)
            sums[0, 0] -= (constant - exact) * sums[2].double().sum(0)
            constant.copy_(exact)
            if d_mask is not None:
                gather(None, None, None, None, None, None, d_mask)

    d_sink = _sink_gradient(inputs, kept, result.entropy, constant, entropy)
    d_scale = None
    if needs.scale and sums is not None:
        of_rows = sums[0].double().sum(0)
        if _pivoted(inputs, rules) and upstream.lse is not None:
            # Σ dz is the gradient of lse, exactly.
            total = torch.where(result.lse == -math.inf, 0.0, upstream.lse.to(dtype))
            of_rows = of_rows + torch.where(torch.isfinite(kept.product_pivot), kept.product_pivot, 0.0).double() * total
        d_scale = of_rows.sum_to_size(inputs.scale.shape)
    return Gradients(
        None if d_query is None else d_query[0] if splits == 1 else d_query.sum(0).to(stored),
        d_key,
        d_value,
        None if d_mask is None or inputs.mask is None else d_mask.to(inputs.mask.dtype),
        None if d_scale is None else d_scale.to(dtype),
        d_sink.sum((0, 2), dtype=torch.float64).to(dtype) if needs.sinks and d_sink is not None else None,
    )


def _pivoted(inputs: Inputs, rules: Rules) -> bool:
    """Whether the gradient of the scale, Σ dz·u, is summed about a pivot, as Σ dz·(u − pivot) + pivot·Σ dz.

    Where Σ dz is not known exactly, the pivot would bring in its rounding: under a cap it is known only by summing it, and beside
    a sink that takes nearly all weight it is a small difference of large numbers.
    """
    return rules.softcap is None and inputs.sinks is None


def _sink_gradient(
    inputs: Inputs, kept: _Figures, row_entropy: Tensor, constant: Tensor, entropy: Tensor | None
) -> Tensor | None:
    """The gradient with respect to the sink's logit, [batch, heads, queries]: a weight without a value, so dp is 0."""
    if inputs.sinks is None:
        return None
    if entropy is None:
        return kept.sink * constant
    surprise = torch.where(kept.sink == 0.0, 0.0, torch.log(kept.sink) + row_entropy)
    return kept.sink * (constant - entropy * surprise)


def _splits(units: int, keys: int, query_bytes: int) -> int:
    """How many parts the keys are dealt to: enough for threads, few enough that each can have a gradient of the queries."""
    tiles = -(-keys // _TILE_KEYS)
    affordable = 1 + _MOST_BYTES_OF_SPLITS // max(query_bytes, 1)
    return max(1, min(_MOST_SPLITS, -(-_UNITS_WANTED // max(units, 1)), tiles, affordable))


def _run(
    direction: str,
    inputs: Inputs,
    rules: Rules,
    statistics: bool,
    written: tuple[int, ...],
    flowing: tuple[int, int, int, int],
    output_gradient: tuple[int, ...] = _NO_VIEW,
    splits: int = 1,
    grown: tuple[int, ...] = (0, 0, 0, 0, 0),
    mask_shape: tuple[int, ...] = (1, 1, 1, 1),
) -> None:
    query, key, value, mask, scale, sinks = inputs
    batch, heads, queries, width = query.shape
    sinks = None if sinks is None else sinks.contiguous()
    record = _RECORD.pack(
        _CODES[query.dtype],
        0 if mask is None else _CODES[mask.dtype],
        *(batch, heads, key.shape[1], queries, key.shape[2], width, 0 if value is None else value.shape[3]),
        *_view(query),
        *_view(key),
        *(_NO_VIEW if value is None else _view(value)),
        *(_NO_VIEW if mask is None else _spread(mask)),
        *(*_spread(scale), 0),
        _address(sinks),
        *(rules.offset, rules.row_step),
        *(_UNLIMITED if side is None else side for side in rules.sides),
        *(rules.seed, torch.get_num_threads(), int(statistics)),
        *written,
        *output_gradient,
        *flowing,
        splits,
        *grown,
        *mask_shape,
        rules.softcap or 0.0,
        rules.dropout_p,
        0.0 if mask is None or mask.dtype == torch.bool else invisible_below(mask.dtype, inputs.compute_dtype),
    )
    assert _cpu is not None
    getattr(_cpu, direction)(record)


def _view(tensor: Tensor) -> tuple[int, ...]:
    return (tensor.data_ptr(), *tensor.stride())


def _spread(tensor: Tensor) -> tuple[int, ...]:
    """The view in which every dimension of one element stands for as many as there are."""
    strides = (0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.data_ptr(), *strides)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
