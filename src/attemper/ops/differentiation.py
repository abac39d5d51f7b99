"""How a kernel joins autograd in eager mode: one `Function` around any of them, past the dispatcher, and no second derivative."""

from typing import Any

import torch
from torch import Tensor

from attemper.kernels.spec import Forward, Inputs, Needs, Rules, Upstream
from attemper.ops.autocast import without_autocast
from attemper.ops.dispatch import may_pass_by
from attemper.ops.flops import tell_flop_counters
from attemper.ops.implementations import KERNELS
from attemper.ops.operators import refuse_second_derivative
from attemper.ops.transforms import TransformedBackward


class Attention(torch.autograd.Function):
    """(kernel's name, rules, statistics, *inputs) → (output, lse, entropy, rest); the first three are differentiable.

    Without statistics the last three are None: each tensor that a Function gives back takes time.
    """

    @staticmethod
    def forward(ctx: Any, kernel: str, rules: Rules, statistics: bool, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the kernel and keep what its backward pass wants."""
        inputs = Inputs(*tensors)  # pyrefly: ignore[bad-argument-type]
        result = KERNELS[kernel].forward(inputs, rules, statistics=statistics, differentiable=True)
        ctx.kernel, ctx.rules = kernel, rules
        ctx.save_for_backward(*inputs, result.output, result.lse, result.entropy, result.figures, result.unrounded)
        ctx.set_materialize_grads(False)
        if result.rest is None:
            return result.output, None, None, None
        ctx.mark_non_differentiable(result.rest)
        return result.output, result.lse, result.entropy, result.rest

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of the tensors, None for the first three arguments."""
        saved = ctx.saved_tensors
        inputs, flowing, needs = Inputs(*saved[:6]), Upstream(*upstream[:3]), Needs(*ctx.needs_input_grad[3:])
        if not any(needs) or all(gradient is None for gradient in flowing):
            return (None,) * len(ctx.needs_input_grad)
        if not may_pass_by(*flowing):
            return None, None, None, *_transformed(ctx.kernel, ctx.rules, inputs, saved[6:], flowing, needs)
        # A kernel takes its row figures to be without gaps; a hook on saved tensors may have laid them out anew.
        output, lse, entropy, figures, unrounded = saved[6:]
        figures = None if figures is None else figures.contiguous()
        result = Forward(output, lse.contiguous(), entropy.contiguous(), None, figures, unrounded)
        with torch.no_grad(), without_autocast(inputs.query.device):
            gradients = KERNELS[ctx.kernel].backward(inputs, ctx.rules, result, flowing, needs)
        if torch.is_grad_enabled():
            gradients = _Once.apply(len(gradients), *gradients, *inputs, *flowing)
        return None, None, None, *gradients


def _transformed(
    kernel: str, rules: Rules, inputs: Inputs, results: tuple[Tensor | None, ...], flowing: Upstream, needs: Needs
) -> tuple[Tensor | None, ...]:
    """The gradients where what flows in comes from a transform, as with `is_grads_batched`, or is recorded by somebody."""
    seed = torch.tensor(rules.seed, device="cpu") if rules.dropout_p > 0.0 else None
    kept = (inputs.query.new_empty(0) if result is None else result for result in results)
    numbers = (*rules.sides, rules.offset, rules.softcap, rules.dropout_p)
    tell_flop_counters()
    gradients = TransformedBackward.apply(*inputs, seed, *kept, *flowing, kernel, *numbers, list(needs))
    return tuple(gradient if need else None for gradient, need in zip(gradients, needs, strict=True))


class _Once(torch.autograd.Function):
    """The identity on gradients that may not be differentiated again. The tensors after them make the graph remember."""

    @staticmethod
    def forward(ctx: Any, kept: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if tensor is None else tensor.clone() for tensor in tensors[:kept])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> None:
        refuse_second_derivative()
