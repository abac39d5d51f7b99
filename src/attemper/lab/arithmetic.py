"""In what a run computes: 16-bit matrix products emulated in float32, and a factor on the loss against underflow.

What it must hold:
- a product's inputs and its result are numbers of the 16-bit type, the gradients' too: beyond the largest they are infinite,
  below half the smallest they are 0;
- sums inside a product are float32, as matrix units keep them;
- everything between two products stays float32, as under autocast.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attemper.lab.config import Arithmetic, Precision

GROWTH = 200  # steps without an overflow after which a dynamic factor doubles
FIRST = 2.0**16
DTYPES = {"fp16": torch.float16, "fp16_safe": torch.float16, "fp16_naive": torch.float16, "bf16_naive": torch.bfloat16}
_current: ContextVar[Arithmetic] = ContextVar("arithmetic", default="fp32")


def current() -> Arithmetic:
    """What `computing` set; the attention of the lab's models asks."""
    return _current.get()


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """To the nearest number of a 16-bit type, in the dtype of `x`; infinite beyond its range."""
    return x.to(dtype).to(x.dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        a, b = rounded(a, dtype), rounded(b, dtype)
        ctx.save_for_backward(a, b)
        ctx.dtype = dtype
        return rounded(torch.matmul(a, b), dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        gradient = rounded(gradients[0], ctx.dtype)
        into_a = torch.matmul(gradient, b.mT).sum_to_size(a.shape)
        into_b = torch.matmul(a.mT, gradient).sum_to_size(b.shape)
        return rounded(into_a, ctx.dtype), rounded(into_b, ctx.dtype), None


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a·b as a 16-bit matrix product, forward and backward.

    Args:
        a: [..., n, d]; b: [..., d, m]; both of at least two dimensions, float32. dtype: float16 or bfloat16.

    Returns:
        [..., n, m], float32 that holds numbers of `dtype`.
    """
    return _Product.apply(a, b, dtype)


class _Linear(TorchFunctionMode):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        return self._linear(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
        # Flat, so that the sum over all tokens in the gradient of the weight is one product, rounded once.
        flat = product(input.reshape(-1, input.shape[-1]), weight.mT, self._dtype)
        flat = flat if bias is None else rounded(flat + bias, self._dtype)
        return flat.reshape(*input.shape[:-1], weight.shape[0])


@contextlib.contextmanager
def computing(arithmetic: Arithmetic) -> Generator[None]:
    """Linear layers and the lab's attention compute so inside: "bf16" by autocast, the other 16-bit ones emulated."""
    token = _current.set(arithmetic)
    try:
        with contextlib.ExitStack() as stack:
            if arithmetic == "bf16":
                stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
            elif arithmetic != "fp32":
                stack.enter_context(_Linear(DTYPES[arithmetic]))
            yield
    finally:
        _current.reset(token)


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float | Tensor, *, causal: bool, softcap: float | None, arithmetic: Arithmetic
) -> Tensor:
    """softmax(scale·q·kᵀ)·v written out, its products in 16 bits.

    Args:
        q, k: [batch, heads, tokens, d]; v: [batch, heads, keys, d_v]; float32.
        scale: a number, or a tensor that broadcasts to [batch, heads, queries, keys].
        causal: key j is hidden from query i at j > i.
        softcap: bound on |logit|, None: none.
        arithmetic: "fp16": the softmax is float32 and subtracts the maximum. "fp16_safe": logits, exponentials, their sum and
            the weights are 16-bit numbers, after the maximum was subtracted. "fp16_naive", "bf16_naive": the same, and nothing
            is subtracted: e^z is infinite from 11.09 on in float16, from 88.73 on in bfloat16.
    """
    dtype = DTYPES[arithmetic]
    rounds, subtracts = arithmetic != "fp16", arithmetic in ("fp16", "fp16_safe")
    logits = product(q, k.mT, dtype)
    # In real 16-bit tensors from here on, where it rounds: each operation rounds by itself, in the backward pass as well.
    logits = (logits.to(dtype) if rounds else logits) * (scale.to(dtype) if rounds and isinstance(scale, Tensor) else scale)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if causal:
        later = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        logits = logits.masked_fill(later, -torch.inf)
    # Not by torch.softmax, which whoever watches the model takes for a second attention call.
    powers = (logits - logits.detach().amax(-1, keepdim=True) if subtracts else logits).exp()
    weights = (powers / powers.sum(-1, keepdim=True)).float()
    return product(weights, v, dtype)


class LossScale:
    """A factor on the loss, taken off the gradients before they are used: constant, or halved at every overflow.

    `torch.amp.GradScaler` does the dynamic part alike, but finds an overflow only of its own optimisers' gradients, after which
    they are not to be read; here gradients are recorded too.
    """

    def __init__(self, precision: Precision) -> None:
        self.dynamic = precision.loss_scale == "dynamic"
        self.factor = FIRST if precision.loss_scale == "dynamic" else float(precision.loss_scale)
        self.clean = 0  # steps since the last overflow

    def take_off(self, gradients: list[Tensor]) -> bool:
        """Divide the gradients by the factor; whether the step may be taken: not if it is dynamic, and one is no number."""
        if self.factor != 1.0:
            for gradient in gradients:
                gradient.div_(self.factor)
        if not self.dynamic:
            return True
        if all(bool(gradient.isfinite().all()) for gradient in gradients):
            self.clean += 1
            if self.clean == GROWTH:
                self.factor, self.clean = 2 * self.factor, 0
            return True
        self.factor, self.clean = self.factor / 2, 0
        return False
