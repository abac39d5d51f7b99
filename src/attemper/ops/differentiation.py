"""How a kernel joins autograd: one `Function` around any of them, and a refusal of second derivatives."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from attemper.errors import UnsupportedError
from attemper.kernels.spec import Forward, Inputs, Needs, Rules, Upstream
from attemper.ops.implementations import Kernel


class Attention(torch.autograd.Function):
    """(kernel, rules, statistics, *inputs) → (output, lse, entropy, rest); output, lse and entropy are differentiable."""

    @staticmethod
    def forward(ctx: Any, kernel: Kernel, rules: Rules, statistics: bool, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the kernel and keep what its backward pass wants."""
        inputs = Inputs(*tensors)  # pyrefly: ignore[bad-argument-type]
        result = kernel.forward(inputs, rules, statistics=statistics, differentiable=any(ctx.needs_input_grad))
        ctx.kernel, ctx.rules = kernel, rules
        ctx.save_for_backward(*inputs, result.output, result.lse, result.entropy, result.figures, result.unrounded)
        ctx.set_materialize_grads(False)
        if result.rest is not None:
            ctx.mark_non_differentiable(result.rest)
        return result.output, result.lse, result.entropy, result.rest

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of the tensors, None for the first three arguments."""
        saved = ctx.saved_tensors
        inputs, (output, lse, entropy, figures, unrounded) = Inputs(*saved[:6]), saved[6:]
        needs = Needs(*ctx.needs_input_grad[3:])
        gradients: tuple[Tensor | None, ...] = (None,) * len(needs)
        if any(needs) and any(gradient is not None for gradient in upstream[:3]):
            result = Forward(output, lse, entropy, None, figures, unrounded)
            with torch.no_grad(), without_autocast(inputs.query.device):
                gradients = ctx.kernel.backward(inputs, ctx.rules, result, Upstream(*upstream[:3]), needs)
        if torch.is_grad_enabled():
            gradients = _Once.apply(len(gradients), *gradients, *inputs, *upstream[:3])
        return (None, None, None, *gradients)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A region in which autocast leaves the products of a kernel in float32. Some devices have no autocast to turn off."""
    available = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if available else nullcontext()


class _Once(torch.autograd.Function):
    """The identity on gradients that may not be differentiated again. The tensors after them make the graph remember."""

    @staticmethod
    def forward(ctx: Any, kept: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if tensor is None else tensor.clone() for tensor in tensors[:kept])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        raise UnsupportedError(
            "attention: a second derivative was asked for, and this kernel has only the first; "
            "write the attention out (softmax(scale * q @ k.mT) @ v) where you need it"
        )
