"""Under torch.func an `autograd.Function` in the style with `setup_context`, which the transforms can take apart.

Operators have no derivative there, and the Function of plain eager calls, which is faster, has no rule for vmap.
"""

from typing import Any

import torch
from torch import Tensor

from attemper.ops import batching, operators


class TransformedAttention(torch.autograd.Function):
    """`operators.forward`, with its arguments and results."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        """Run the operator, which is below every transform here."""
        return operators.forward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep what the backward pass wants."""
        operators.keep_for_backward(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        """One gradient for each argument."""
        return operators.gradients(ctx, upstream, TransformedBackward.apply)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        """Fold the dimension into the batch."""
        return batching.rule(TransformedAttention.apply, batching.FORWARD)(info, in_dims, *arguments)


class TransformedBackward(torch.autograd.Function):
    """`operators.backward`, with its arguments and results; it has no derivative."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        """Run the operator."""
        return operators.backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> None:
        """Refuse."""
        operators.refuse_second_derivative()

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        """Fold the dimension into the batch."""
        return batching.rule(TransformedBackward.apply, batching.BACKWARD)(info, in_dims, *arguments)
