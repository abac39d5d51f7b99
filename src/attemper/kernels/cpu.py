"""The compiled kernel: C++ from csrc/, built for several instruction sets, chosen when it is loaded.

This side allocates and checks nothing but whether the extension is here; the arguments were checked above. A problem crosses as
one packed record of addresses, sizes and strides (csrc/problem.h); no tensor library is linked.
"""

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
_RECORD = struct.Struct("=68q3d")

# Where few heads would leave threads idle, the keys are dealt to this many units. It follows from the shape alone, so that
# results do not depend on the number of threads.
_UNITS_WANTED = 8
_MOST_SPLITS = 4
_TILE_KEYS = 128


def available() -> bool:
    """Whether the extension was built and can run here."""
    return _cpu is not None


def refusal(inputs: Inputs) -> str:
    """What the kernel does not take of these tensors, "" if it takes them all: it reads plain memory of this process."""
    for tensor in inputs:
        if tensor is None:
            continue
        if tensor.device.type != "cpu":
            return f"a tensor on {tensor.device}"
        if type(tensor) not in (Tensor, torch.nn.Parameter):
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


def _choose() -> None:
    wanted = os.environ.get(_ISA_VARIABLE, "")
    if _cpu is not None and not _cpu.choose_instruction_set(wanted):
        raise UnsupportedError(
            f"{_ISA_VARIABLE}: got {wanted!r}; expected avx512bf16, avx512, avx2 or portable, as far as this processor has it"
        )


_choose()


class _Kept(NamedTuple):
    """Row figures of the forward pass that the backward pass wants; see RowTerms in csrc/backward.h."""

    pivot: Tensor
    peak: Tensor
    surprise: Tensor
    sink: Tensor
    product_pivot: Tensor


def forward(inputs: Inputs, rules: Rules, *, statistics: bool, differentiable: bool) -> Forward:
    """softmax(z) v and the record of z."""
    batch, heads, queries, _ = inputs.shape
    dtype = inputs.compute_dtype

    def rows(*before: int) -> Tensor:
        return torch.empty(*before, batch, heads, queries, dtype=dtype, device="cpu")

    output = None
    if inputs.value is not None:
        output = torch.empty(batch, heads, queries, inputs.value.shape[-1], dtype=inputs.query.dtype, device="cpu")
    lse, entropy, kept = rows(), rows(), _Kept(*(rows() for _ in _Kept._fields))
    rest = rows(10) if statistics else None
    # The backward pass wants the output unrounded: D = Σ o·do would inherit its rounding.
    unrounded = None
    if differentiable and output is not None and output.dtype != dtype:
        unrounded = torch.empty_like(output, dtype=dtype)
    if lse.numel():
        outputs = (_address(output), lse.data_ptr(), entropy.data_ptr(), _address(rest), _address(unrounded))
        figures = tuple(each.data_ptr() for each in kept[:4])
        _run("forward", inputs, rules, statistics, (*outputs, *figures), (0, 0, kept.product_pivot.data_ptr()))
    return Forward(output, lse, entropy, rest, () if not differentiable else kept if unrounded is None else (*kept, unrounded))


def backward(inputs: Inputs, rules: Rules, result: Forward, upstream: Upstream, needs: Needs) -> Gradients:
    """The gradients that `needs` asks for."""
    kept, dtype = _Kept(*result.saved[:5]), inputs.compute_dtype
    output = result.saved[5] if len(result.saved) == 6 else result.output
    batch, heads, queries, keys = inputs.shape
    kv_heads, width = inputs.key.shape[1], inputs.query.shape[-1]
    constant = torch.zeros_like(result.lse) if upstream.lse is None else upstream.lse.to(dtype)
    if upstream.output is not None and output is not None:
        # In float64: where the weights are sharp, dp − D is a small difference of two sums.
        constant = (constant - (output.double() * upstream.output.double()).sum(-1)).to(dtype)
    constant = constant.contiguous()
    entropy = None if upstream.entropy is None else upstream.entropy.to(dtype).contiguous()

    splits = _splits(batch * kv_heads, keys)

    def zeros(need: bool, *shape: int) -> Tensor | None:
        return torch.zeros(shape, dtype=dtype, device="cpu") if need else None

    d_query = zeros(needs.query, splits, batch, heads, queries, width)
    d_key = zeros(needs.key, *inputs.key.shape)
    d_value = zeros(needs.value, *inputs.value.shape) if inputs.value is not None else None
    # Weights of bfloat16 may have been rounded before they met the values, and D = Σ o·do with them. Gradients in float want
    # better: two more sums of the backward pass give D again, and what its error does to the first.
    rounded = inputs.query.dtype == torch.bfloat16
    again = rounded and (needs.scale or needs.sinks or needs.mask)
    sums = zeros(needs.scale or again, 3 if rounded else 1, splits, batch, heads, queries)
    d_mask = zeros(needs.mask, *inputs.mask.shape) if inputs.mask is not None else None
    if result.lse.numel() and keys:
        # Autograd may hand on a gradient whose sign is yet to be turned; the kernel reads memory.
        flow = None if upstream.output is None else upstream.output.resolve_neg()
        view = _NO_VIEW if flow is None else _view(flow)
        # Under a cap Σ dz is known only by summing it, and a pivot would bring in its rounding.
        pivot = 0 if rules.softcap is not None else kept.product_pivot.data_ptr()
        written = (0, 0, 0, 0, 0, *(each.data_ptr() for each in kept[:4]))

        def gather(constant: Tensor, *grown: Tensor | None) -> None:
            flowing = (constant.data_ptr(), _address(entropy), pivot)
            shape = (1, 1, 1, 1) if d_mask is None else d_mask.shape
            _run("backward", inputs, rules, False, written, flowing, view, splits, tuple(map(_address, grown)), shape)

        gather(constant, d_query, d_key, d_value, sums, None if again else d_mask)
        if again and sums is not None:
            exact = (torch.zeros_like(result.lse) if upstream.lse is None else upstream.lse).double() - sums[1].double().sum(0)
            error, constant = constant - exact, exact.to(dtype).contiguous()
            sums[0, 0] -= error * sums[2].double().sum(0)
            if d_mask is not None:
                gather(constant, None, None, None, None, d_mask)

    d_sink = _sink_gradient(inputs, kept, result.entropy, constant, entropy)
    d_scale = None
    if needs.scale and sums is not None:
        of_rows = sums[0].double().sum(0)
        if rules.softcap is None:
            # Σ dz over keys and sink is the gradient of lse, exactly.
            total = torch.zeros_like(result.lse) if upstream.lse is None else upstream.lse.to(dtype)
            total = torch.where(result.lse == -math.inf, 0.0, total if d_sink is None else total - d_sink)
            of_rows = of_rows + torch.where(torch.isfinite(kept.product_pivot), kept.product_pivot, 0.0).double() * total
        d_scale = of_rows.sum_to_size(inputs.scale.shape)
    return Gradients(
        None if d_query is None else (d_query.sum(0) if splits > 1 else d_query[0]).to(inputs.query.dtype),
        None if d_key is None else d_key.to(inputs.key.dtype),
        None if d_value is None or inputs.value is None else d_value.to(inputs.value.dtype),
        None if d_mask is None or inputs.mask is None else d_mask.to(inputs.mask.dtype),
        None if d_scale is None else d_scale.to(dtype),
        d_sink.sum((0, 2), dtype=torch.float64).to(dtype) if needs.sinks and d_sink is not None else None,
    )


def _sink_gradient(inputs: Inputs, kept: _Kept, row_entropy: Tensor, constant: Tensor, entropy: Tensor | None) -> Tensor | None:
    """The gradient with respect to the sink's logit, [batch, heads, queries]: a weight without a value, so dp is 0."""
    if inputs.sinks is None:
        return None
    if entropy is None:
        return kept.sink * constant
    surprise = torch.where(kept.sink == 0.0, 0.0, torch.log(kept.sink) + row_entropy)
    return kept.sink * (constant - entropy * surprise)


def _splits(units: int, keys: int) -> int:
    tiles = -(-keys // _TILE_KEYS)
    return max(1, min(_MOST_SPLITS, -(-_UNITS_WANTED // max(units, 1)), tiles))


def _run(
    direction: str,
    inputs: Inputs,
    rules: Rules,
    statistics: bool,
    written: tuple[int, ...],
    flowing: tuple[int, int, int],
    output_gradient: tuple[int, ...] = _NO_VIEW,
    splits: int = 1,
    grown: tuple[int, ...] = (0, 0, 0, 0, 0),
    mask_shape: tuple[int, ...] = (1, 1, 1, 1),
) -> None:
    batch, heads, queries, keys = inputs.shape
    mask, value = inputs.mask, inputs.value
    scale = inputs.scale.expand(batch, heads, queries)
    sinks = None if inputs.sinks is None else inputs.sinks.contiguous()
    record = _RECORD.pack(
        _CODES[inputs.query.dtype],
        0 if mask is None else _CODES[mask.dtype],
        *(batch, heads, inputs.key.shape[1], queries, keys, inputs.query.shape[-1], 0 if value is None else value.shape[-1]),
        *_view(inputs.query),
        *_view(inputs.key),
        *(_NO_VIEW if value is None else _view(value)),
        *(_NO_VIEW if mask is None else _view(mask.expand(batch, heads, queries, keys))),
        *(scale.data_ptr(), *scale.stride(), 0),
        _address(sinks),
        rules.offset,
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


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
