"""The compiled kernel: C++ from csrc/, built for several instruction sets, chosen when it is loaded.

This side allocates and checks nothing but whether the extension is here; the arguments were checked above. A problem crosses as
one packed record of addresses, sizes and strides (csrc/problem.h); no tensor library is linked.
"""

import enum
import functools
import math
import os
import struct
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from attemper.kernels.layout import laid_out
from attemper.kernels.spec import Forward, Gradients, Inputs, Needs, Rules, Upstream, invisible_below

try:
    from attemper.kernels import _cpu
except ImportError:
    _cpu = None

_BUILD_VARIABLE = "ATTEMPER_CPU_ISA"
_BUILDS = ("avx512bf16", "avx512", "avx2", "neon", "portable")
_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3, torch.bool: 4}
_UNLIMITED = 2**63 - 1
_NO_VIEW = (0, 0, 0, 0, 0)
_RECORD = struct.Struct("=92q3d")  # the fields of Problem in csrc/problem.h, in which _packed puts them
# The same record cut up around the addresses of query, key, value, output, and of lse, entropy and rest.
_AROUND_ADDRESSES = struct.Struct("=72sq32sq32sq176sq32s3q360s")

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


def _mischosen() -> str:
    wanted = os.environ.get(_BUILD_VARIABLE, "")
    if _cpu is None or _cpu.choose_instruction_set(wanted):
        return ""
    here = ", ".join(build for build in _BUILDS if _cpu.choose_instruction_set(build))
    return f"{_BUILD_VARIABLE}: got {wanted!r}; expected a build that this processor can run ({here}), or unset it for the best"


# What is wrong with the build that the environment asks for, "" if nothing is. It is said where the kernel is asked for: whoever
# wants none of it, or wants to know what is here, is not stopped.
MISCHOSEN = _mischosen()
if MISCHOSEN:
    _cpu = None


def available() -> bool:
    """Whether the extension was built, can run here, and is the one that was asked for."""
    return _cpu is not None


def refusal(inputs: Iterable[Tensor | None]) -> str:
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
        return MISCHOSEN or "compiled C++; not built here: reinstall with pip install -v to see why"
    return f"compiled C++, {_cpu.instruction_set()}, memory in proportion to the length"


def rounds_weights() -> bool:
    """Whether the build in use rounds weights to bfloat16 before they meet values of bfloat16."""
    return _cpu is not None and _cpu.rounds_weights()


class _Figure(enum.IntEnum):
    """Row figures of the forward pass that the backward pass wants, by their place; see RowTerms in csrc/gradients.h."""

    PIVOT = 0
    PEAK = 1
    SURPRISE = 2
    SINK = 3
    PRODUCT_PIVOT = 4


FIGURES = len(_Figure)
LIKE_INPUTS: bool = True


def forward(inputs: Inputs, rules: Rules, *, statistics: bool, differentiable: bool) -> Forward:
    """softmax(z) v and the record of z; the output is laid out as the queries are."""
    query, _, value, _, scale, _ = inputs
    rows = query.shape[:3]
    output = None if value is None else laid_out(query, *rows, value.shape[-1])
    lse, entropy = scale.new_empty(*rows), scale.new_empty(*rows)
    rest = scale.new_empty(10, *rows) if statistics else None
    figures = scale.new_empty(FIGURES, *rows) if differentiable else None
    # The backward pass wants the output unrounded: D = Σ o·do would inherit its rounding.
    unrounded = None
    if differentiable and output is not None and output.dtype != scale.dtype:
        unrounded = torch.empty_like(output, dtype=scale.dtype)
    if lse.numel():
        outputs = (*_view(output), lse.data_ptr(), entropy.data_ptr(), _address(rest), *_view(unrounded))
        *kept, product_pivot = (0,) * FIGURES if figures is None else _addresses(figures)
        _run("forward", inputs, rules, statistics, (*outputs, *kept), (0, 0, product_pivot, 0))
    return Forward(output, lse, entropy, rest, figures, unrounded)


class Plan(NamedTuple):
    """What of a plain call follows from shapes and strides: the shapes of the results, the scale, and the record, cut up."""

    rows: tuple[int, ...]
    output: tuple[int, ...]
    strides: tuple[int, ...]  # of the output
    scale: Tensor  # whose address is in the record
    head: bytes
    query_strides: bytes
    key_strides: bytes
    value_strides: bytes  # and what follows them up to the output
    output_strides: bytes
    tail: bytes


def plan(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, statistics: bool
) -> tuple[Plan, tuple[int, int, int]] | None:
    """The plan of a call with three ordinary tensors of fitting shapes, and their addresses; None for any others.

    With a few rows most of a call's time passes in Python: here as little of it runs as can tell that nothing more is wanted.
    """
    for tensor in (query, key, value):
        if type(tensor) is not Tensor or not tensor.is_cpu or tensor.is_neg():
            return None
    if _cpu is None or not query.dtype is key.dtype is value.dtype:
        return None
    try:
        addresses = query.data_ptr(), key.data_ptr(), value.data_ptr()
        strides = query.stride(), key.stride(), value.stride()
    except RuntimeError:  # sparse, opaque and nested tensors lack the one or the other
        return None
    shapes = query.shape, key.shape, value.shape
    found = _plan(query.dtype, shapes, strides, is_causal, statistics, torch.get_num_threads())
    return None if found is None or 0 in addresses else (found, addresses)  # a tensor of noughts may have no memory


def plain(plan: Plan, addresses: tuple[int, int, int], query: Tensor, statistics: bool) -> tuple[Tensor, ...]:
    """`forward` by a plan, to the bit the same: (output,), and with statistics (output, lse, entropy, rest)."""
    q, k, v = addresses
    results: tuple[Tensor, ...] = (query.new_empty_strided(plan.output, plan.strides),)
    if statistics:
        rows, new = plan.rows, plan.scale.new_empty
        results = (*results, new(*rows), new(*rows), new(10, *rows))
    address, *others = (each.data_ptr() for each in results)
    read = (plan.head, q, plan.query_strides, k, plan.key_strides, v, plan.value_strides)
    assert _cpu is not None
    _cpu.forward(_AROUND_ADDRESSES.pack(*read, address, plan.output_strides, *(others or (0, 0, 0)), plan.tail))
    return results


@functools.lru_cache(maxsize=256)
def _plan(
    dtype: torch.dtype,
    shapes: tuple[tuple[int, ...], ...],
    strides: tuple[tuple[int, ...], ...],
    is_causal: bool,
    statistics: bool,
    threads: int,
) -> Plan | None:
    query, key, value = shapes
    if not dtype.is_floating_point or dtype not in _CODES or any(len(shape) != 4 or 0 in shape for shape in shapes):
        return None
    if key != (*query[:2], key[2], query[3]) or value[:3] != key[:3]:
        return None
    with torch.inference_mode(False):  # the scale outlives this call, and others may differentiate
        factor = 1.0 / math.sqrt(query[3])
        scale = torch.full((1, 1, 1), factor, dtype=torch.float64 if dtype == torch.float64 else torch.float32, device="cpu")
    q, k, v = (torch.empty_strided(*each, dtype=dtype, device="meta") for each in zip(shapes, strides, strict=True))
    output = laid_out(q, *query[:3], value[3])
    written = (*_view(output), *(0,) * 12)
    record = _packed(Inputs(q, k, v, None, scale, None), Rules(is_causal=is_causal), threads, statistics, written)
    head, _, of_query, _, of_key, _, of_value, _, of_output, *_, tail = _AROUND_ADDRESSES.unpack(record)
    results = tuple(query[:3]), tuple(output.shape), tuple(output.stride())
    return Plan(*results, scale, head, of_query, of_key, of_value, of_output, tail)


def backward(inputs: Inputs, rules: Rules, result: Forward, upstream: Upstream, needs: Needs) -> Gradients:
    """The gradients that `needs` asks for; those of q, k and v are laid out as they are."""
    threads = torch.get_num_threads()
    if _FORKED and threads > 1:  # torch's own loops over many numbers would wait for threads that did not survive the fork
        torch.set_num_threads(1)
        try:
            return _backward(inputs, rules, result, upstream, needs)
        finally:
            torch.set_num_threads(threads)
    return _backward(inputs, rules, result, upstream, needs)


def _backward(inputs: Inputs, rules: Rules, result: Forward, upstream: Upstream, needs: Needs) -> Gradients:
    query, key, value, mask, scale, _ = inputs
    figures, dtype, rows = result.figures, scale.dtype, result.lse.numel()
    assert figures is not None
    output = result.output if result.unrounded is None else result.unrounded
    if output is not None and output.stride(-1) != 1:  # a hook on saved tensors may have laid it out anew
        output = output.contiguous()
    batch, heads, queries, width = query.shape
    constant = torch.zeros_like(result.lse)
    of_lse = None if upstream.lse is None else upstream.lse.to(dtype).contiguous()
    entropy = None if upstream.entropy is None else upstream.entropy.to(dtype).contiguous()

    units = batch * key.shape[1]
    splits = _splits(units, key.shape[2], batch * heads * queries * width * dtype.itemsize)
    together = _together(units, splits, torch.get_num_threads())

    def grown(found: Tensor) -> Tensor:
        """It, with noughts where the kernel will have no row to write."""
        return found if rows else found.zero_()

    # Where keys are dealt to several units each has a gradient of the queries.
    of_units = d_query = None
    if needs.query and together:
        d_query = grown(laid_out(query, *query.shape))
    elif needs.query:
        of_units = grown(laid_out(query, splits, *query.shape, dtype=dtype))
        d_query = of_units[0]
    d_key = grown(laid_out(key, *key.shape)) if needs.key else None
    d_value = grown(laid_out(value, *value.shape)) if needs.value and value is not None else None
    # Weights of bfloat16 may have been rounded before they met the values, and D = Σ o·do with them. Gradients in float want
    # better: two more sums of the backward pass give D again, and what its error does to the first.
    rounded = query.dtype == torch.bfloat16 and rounds_weights()
    again = rounded and (needs.scale or needs.sinks or needs.mask)
    sums = d_mask = None
    if needs.scale or again:
        sums = grown(scale.new_empty(3 if rounded else 1, splits, batch, heads, queries))
    if needs.mask and mask is not None:
        d_mask = grown(scale.new_empty(mask.shape))
    if rows:
        # Autograd may hand on a gradient whose sign is yet to be turned; the kernel reads memory.
        flow = None if upstream.output is None else upstream.output.resolve_neg()
        view = _view(flow)
        *kept, product_pivot = _addresses(figures)
        pivot = product_pivot if _pivoted(inputs, rules) else 0
        mask_shape = (1, 1, 1, 1) if d_mask is None else d_mask.shape

        between = 0 if of_units is None else of_units.stride(0)

        def gather(of_lse: Tensor | None, output: Tensor | None, *gradients: Tensor | None) -> None:
            d_query, d_key, d_value, sums, d_mask = gradients
            written = (*_NO_VIEW, 0, 0, 0, *_view(output), *kept)
            flowing = (_address(of_lse), _address(entropy), pivot, constant.data_ptr())
            of_inputs = (*_view(d_query), between, *_view(d_key), *_view(d_value))
            growing = (splits, together, *of_inputs, _address(sums), _address(d_mask), *mask_shape)
            _run("backward", inputs, rules, False, written, flowing, view, growing)

        gather(of_lse, output, d_query, d_key, d_value, sums, None if again else d_mask)
        if again and sums is not None:
            exact = (0.0 if of_lse is None else of_lse.double()) - sums[1].double().sum(0)
            sums[0, 0] -= (constant - exact) * sums[2].double().sum(0)
            constant.copy_(exact)
            if d_mask is not None:
                gather(None, None, None, None, None, None, d_mask)

    d_scale = None
    if needs.scale and sums is not None:
        of_rows = sums[0].double().sum(0)
        if _pivoted(inputs, rules) and upstream.lse is not None:
            # Σ dz is the gradient of lse, exactly.
            total = torch.where(result.lse == -math.inf, 0.0, upstream.lse.to(dtype))
            pivots = figures[_Figure.PRODUCT_PIVOT]
            of_rows = of_rows + torch.where(torch.isfinite(pivots), pivots, 0.0).double() * total
        d_scale = of_rows.sum_to_size(scale.shape)
    return Gradients(
        d_query if of_units is None else _sum_of_parts(of_units).to(query.dtype),
        d_key,
        d_value,
        None if d_mask is None or mask is None else d_mask.to(mask.dtype),
        None if d_scale is None else d_scale.to(dtype),
        _sinks_gradient(figures[_Figure.SINK], result.entropy, constant, entropy) if needs.sinks else None,
    )


def reduce_rows(record: bytes) -> None:
    """Reduce rows to heads: see row_reduction, and Reduction in csrc/heads.h."""
    assert _cpu is not None
    _cpu.reduce_rows(record)


def _pivoted(inputs: Inputs, rules: Rules) -> bool:
    """Whether the gradient of the scale, Σ dz·u, is summed about a pivot, as Σ dz·(u − pivot) + pivot·Σ dz.

    Where Σ dz is not known exactly, the pivot would bring in its rounding: under a cap it is known only by summing it, and beside
    a sink that takes nearly all weight it is a small difference of large numbers.
    """
    return rules.softcap is None and inputs.sinks is None


def _sinks_gradient(sink: Tensor, row_entropy: Tensor, constant: Tensor, entropy: Tensor | None) -> Tensor:
    """The gradient with respect to the sinks' logits, [heads]: of weights without a value, so dp is 0.

    Args:
        sink: the weight of the sink in each row, [batch, heads, queries].
    """
    flow = constant
    if entropy is not None:
        flow = constant - entropy * torch.where(sink == 0.0, 0.0, torch.log(sink) + row_entropy)
    return (sink * flow).sum((0, 2), dtype=torch.float64).to(sink.dtype)


def _splits(units: int, keys: int, query_bytes: int) -> int:
    """How many parts the keys are dealt to: enough for threads, few enough that each can have a gradient of the queries."""
    tiles = -(-keys // _TILE_KEYS)
    affordable = 1 + _MOST_BYTES_OF_SPLITS // max(query_bytes, 1)
    return max(1, min(_MOST_SPLITS, -(-_UNITS_WANTED // max(units, 1)), tiles, affordable))


def _together(units: int, splits: int, threads: int) -> bool:
    """Whether one unit had better take all parts of a head: it reads the queries once, and adds the parts up where they are.

    It sums as the parts do on their own, in the same order, so this may follow from the number of threads; they must not wait.
    """
    return -(-units // threads) * splits <= -(-units * splits // threads)


def _run(direction: str, inputs: Inputs, rules: Rules, statistics: bool, *addresses: tuple[int, ...]) -> None:
    if inputs.sinks is not None:
        inputs = inputs._replace(sinks=inputs.sinks.contiguous())
    getattr(_cpu, direction)(_packed(inputs, rules, torch.get_num_threads(), statistics, *addresses))


def _packed(
    inputs: Inputs,
    rules: Rules,
    threads: int,
    statistics: bool,
    written: tuple[int, ...],
    flowing: tuple[int, ...] = (0, 0, 0, 0),
    output_gradient: tuple[int, ...] = _NO_VIEW,
    growing: tuple[int, ...] = (1, 1, *_NO_VIEW, 0, *_NO_VIEW, *_NO_VIEW, 0, 0, 1, 1, 1, 1),
) -> bytes:
    query, key, value, mask, scale, sinks = inputs
    left, right = rules.sides
    return _RECORD.pack(
        _CODES[query.dtype],
        0 if mask is None else _CODES[mask.dtype],
        *(*query.shape[:2], key.shape[1], query.shape[2], key.shape[2], query.shape[3], 0 if value is None else value.shape[3]),
        *_view(query),
        *_view(key),
        *_view(value),
        *(_NO_VIEW if mask is None else _spread(mask)),
        *(*_spread(scale), 0),
        _address(sinks),
        *(rules.offset, rules.row_step, _UNLIMITED if left is None else left, _UNLIMITED if right is None else right),
        *(rules.seed, threads, statistics),
        *written,
        *output_gradient,
        *flowing,
        *growing,
        rules.softcap or 0.0,
        rules.dropout_p,
        0.0 if mask is None or mask.dtype == torch.bool else invisible_below(mask.dtype, inputs.compute_dtype),
    )


def _sum_of_parts(parts: Tensor) -> Tensor:
    """Σ over the first dimension, two or more of them, in order."""
    found = parts[0] + parts[1]
    for part in parts[2:]:
        found += part
    return found


def _view(tensor: Tensor | None) -> tuple[int, ...]:
    return _NO_VIEW if tensor is None else (tensor.data_ptr(), *tensor.stride())


def _spread(tensor: Tensor) -> tuple[int, ...]:
    """The view in which every dimension of one element stands for as many as there are."""
    strides = [0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return (tensor.data_ptr(), *strides)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _addresses(figures: Tensor) -> range:
    """Where each row figure begins."""
    start, step = figures.data_ptr(), figures.stride(0) * figures.element_size()
    return range(start, start + FIGURES * step, step)
