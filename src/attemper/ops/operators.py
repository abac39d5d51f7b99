"""The kernels as operators of torch, for whoever must see a call without running it: compilers, transforms, fake tensors.

What it must hold:
- an operator takes the kernel by name, tensors in the normal form of `Inputs`, and the rules as plain numbers;
- it returns a fixed number of tensors without gaps that share no memory, empty where one is not wanted, so that their shapes
  and strides follow from the arguments;
- the seed of dropout is a tensor that is drawn outside: a compiled graph holds no number from the time when it was made.
"""

from typing import Any

import torch
from torch import Tensor

from attemper.errors import UnsupportedError
from attemper.kernels.layout import laid_out
from attemper.kernels.spec import Forward, Inputs, Needs, Rules, Upstream
from attemper.ops import batching
from attemper.ops.autocast import without_autocast
from attemper.ops.dispatch import with_autograd
from attemper.ops.flops import tell_flop_counters
from attemper.ops.implementations import KERNELS, Kernel, choose

_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor scale, Tensor? sinks, Tensor? seed"
_RULES = "SymInt? left, SymInt? right, SymInt offset, float? softcap, float dropout_p"

torch.library.define(
    "attemper::forward",
    f"({_INPUTS}, str kernel, {_RULES}, bool statistics, bool differentiable)"
    " -> (Tensor output, Tensor lse, Tensor entropy, Tensor rest, Tensor figures, Tensor unrounded)",
)
torch.library.define(
    "attemper::row_stats",
    "(Tensor query, Tensor key, Tensor? mask, Tensor scale, Tensor? sinks, str kernel,"
    " SymInt? left, SymInt? right, SymInt offset, float? softcap, SymInt row_step) -> (Tensor lse, Tensor entropy, Tensor rest)",
)
torch.library.define(
    "attemper::backward",
    f"({_INPUTS}, Tensor output, Tensor lse, Tensor entropy, Tensor figures, Tensor unrounded,"
    f" Tensor? d_output, Tensor? d_lse, Tensor? d_entropy, str kernel, {_RULES}, bool[] needs)"
    " -> (Tensor d_query, Tensor d_key, Tensor d_value, Tensor d_mask, Tensor d_scale, Tensor d_sinks)",
)

forward = torch.ops.attemper.forward.default
row_stats = torch.ops.attemper.row_stats.default
backward = torch.ops.attemper.backward.default

# How many arguments of `forward` may have a gradient, and how many results may bring one.
DIFFERENTIABLE_ARGUMENTS, DIFFERENTIABLE_RESULTS = len(Inputs._fields), len(Upstream._fields)
_LIKE_INPUTS = 3  # how many of the gradients, those of query, key and value, may be laid out as these are


def _problem(arguments: tuple[Any, ...], numbers: list[Any]) -> tuple[Inputs, Rules]:
    """What _INPUTS, with which the arguments begin, and _RULES stand for."""
    *tensors, seed = arguments[:7]
    left, right, offset, softcap, dropout_p = numbers
    number = 0 if seed is None else int(seed)
    return Inputs(*tensors), Rules(window=(left, right), offset=offset, softcap=softcap, dropout_p=dropout_p, seed=number)


def _wanted(tensor: Tensor) -> Tensor | None:
    return None if batching.nothing(tensor) else tensor


def _result(tensor: Tensor | None, query: Tensor, dtype: torch.dtype) -> Tensor:
    return query.new_empty(0, dtype=dtype) if tensor is None else tensor.contiguous()


@torch.library.impl("attemper::forward", "default")
def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    kernel, *numbers, statistics, differentiable = arguments[7:]
    inputs, rules = _problem(arguments, numbers)
    query, found = inputs.query, KERNELS[choose(kernel, inputs, seen=True)]
    with without_autocast(query.device):
        result = found.forward(inputs, rules, statistics=statistics, differentiable=differentiable)
    assert result.output is not None
    of_rows = (_result(part, query, inputs.compute_dtype) for part in (result.lse, result.entropy, result.rest, result.figures))
    unrounded = query.new_empty(0, dtype=inputs.compute_dtype) if result.unrounded is None else result.unrounded
    return _as_promised(found, result.output), *of_rows, _as_promised(found, unrounded)


@torch.library.register_fake("attemper::forward")
def _forward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    query, _, value, _, scale, _, _, kernel, *_, statistics, differentiable = arguments
    rows, dtype, figures = query.shape[:3], scale.dtype, KERNELS[kernel].FIGURES
    output = _empty(kernel, query, *rows, value.shape[-1])
    keeps = differentiable and figures > 0  # a kernel that keeps no figures keeps no output either
    return (
        output,
        query.new_empty(rows, dtype=dtype),
        query.new_empty(rows, dtype=dtype),
        query.new_empty((10, *rows) if statistics else (0,), dtype=dtype),
        query.new_empty((figures, *rows) if keeps else (0,), dtype=dtype),
        torch.empty_like(output, dtype=dtype) if keeps and dtype != query.dtype else query.new_empty(0, dtype=dtype),
    )


def _as_promised(kernel: Kernel, tensor: Tensor) -> Tensor:
    """An output or a gradient of q, k or v, laid out as `_empty` says."""
    return tensor if kernel.LIKE_INPUTS else tensor.contiguous()


def _empty(kernel: str, like: Tensor, *shape: int) -> Tensor:
    return laid_out(like, *shape) if KERNELS[kernel].LIKE_INPUTS else like.new_empty(*shape)


@torch.library.impl("attemper::row_stats", "default")
def _row_stats(
    query: Tensor, key: Tensor, mask: Tensor | None, scale: Tensor, sinks: Tensor | None, kernel: str, *numbers: Any
) -> tuple[Tensor, ...]:
    left, right, offset, softcap, row_step = numbers
    inputs = Inputs(query, key, None, mask, scale, sinks)
    rules = Rules(window=(left, right), offset=offset, softcap=softcap, row_step=row_step)
    found = KERNELS[choose(kernel, inputs, seen=True)]
    with without_autocast(query.device):
        result = found.forward(inputs, rules, statistics=True, differentiable=False)
    return tuple(_result(part, query, inputs.compute_dtype) for part in (result.lse, result.entropy, result.rest))


@torch.library.register_fake("attemper::row_stats")
def _row_stats_fake(query: Tensor, key: Tensor, mask: Tensor | None, scale: Tensor, *others: Any) -> tuple[Tensor, ...]:
    rows = query.shape[:3]
    return tuple(query.new_empty(shape, dtype=scale.dtype) for shape in (rows, rows, (10, *rows)))


@torch.library.impl("attemper::backward", "default")
def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    results, flowing, (kernel, *numbers, needs) = arguments[7:12], Upstream(*arguments[12:15]), arguments[15:]
    inputs, rules = _problem(arguments, numbers)
    # A kernel takes its own results to be laid out as it made them; vmap may have spread them since.
    query, found = inputs.query, KERNELS[choose(kernel, inputs, seen=True)]
    output, lse, entropy, figures, unrounded = results
    output, unrounded = _as_promised(found, output), _as_promised(found, unrounded)
    lse, entropy, figures = lse.contiguous(), entropy.contiguous(), figures.contiguous()
    result = Forward(output, lse, entropy, None, _wanted(figures), _wanted(unrounded))
    with without_autocast(query.device), with_autograd():  # the reference differentiates by it
        gradients = found.backward(inputs, rules, result, flowing, Needs(*needs))
    return tuple(
        query.new_empty(0)
        if gradient is None
        else _as_promised(found, gradient)
        if place < _LIKE_INPUTS
        else gradient.contiguous()
        for place, gradient in enumerate(gradients)
    )


@torch.library.register_fake("attemper::backward")
def _backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    query, kernel, needs = arguments[0], arguments[15], arguments[-1]
    return tuple(
        query.new_empty(0)
        if not need or tensor is None
        else _empty(kernel, tensor, *tensor.shape)
        if place < _LIKE_INPUTS
        else tensor.new_empty(tensor.shape)
        for place, (tensor, need) in enumerate(zip(arguments[:DIFFERENTIABLE_ARGUMENTS], needs, strict=True))
    )


def keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """What `gradients` wants to see of a call of `forward`: its arguments and results."""
    tensors, rules = inputs[:7], inputs[7:13]
    result, lse, entropy, rest, figures, unrounded = output
    ctx.save_for_backward(*tensors, result, lse, entropy, figures, unrounded)
    ctx.rules = rules
    ctx.mark_non_differentiable(rest, figures, unrounded)
    ctx.set_materialize_grads(False)


def gradients(ctx: Any, upstream: tuple[Tensor | None, ...], call: Any) -> tuple[Tensor | None, ...]:
    """One gradient for each argument of `forward`, by way of `call`, which is `backward` or takes its place."""
    needs = ctx.needs_input_grad[:DIFFERENTIABLE_ARGUMENTS]
    flowing = upstream[:DIFFERENTIABLE_RESULTS]
    found: tuple[Tensor | None, ...] = (None,) * len(needs)
    if any(needs) and any(gradient is not None for gradient in flowing):
        tell_flop_counters()
        results = call(*ctx.saved_tensors, *flowing, *ctx.rules, list(needs))
        found = tuple(gradient if need else None for gradient, need in zip(results, needs, strict=True))
    return (*found, *(None,) * (len(ctx.needs_input_grad) - len(needs)))


def refuse_second_derivative(*_: Any) -> None:
    """The derivative of `backward`.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        "attention: a second derivative was asked for, and this kernel has only the first; "
        "write the attention out (softmax(scale * q @ k.mT) @ v) where you need it"
    )


torch.library.register_autograd(
    "attemper::forward", lambda ctx, *upstream: gradients(ctx, upstream, backward), setup_context=keep_for_backward
)
torch.library.register_autograd("attemper::backward", refuse_second_derivative)
torch.library.register_vmap("attemper::forward", batching.rule(forward, batching.FORWARD))
torch.library.register_vmap("attemper::row_stats", batching.rule(row_stats, batching.ROW_STATS))
torch.library.register_vmap("attemper::backward", batching.rule(backward, batching.BACKWARD))
