"""What the tests of capture share: results compared tensor by tensor, attention results logged, a record computed again."""

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attemper.capture import AttentionCall, capture
from attemper.ops import attention


def tensors(output: Any) -> list[Tensor]:
    """Every tensor in what a model returns, in order."""
    if isinstance(output, Tensor):
        return [output]
    items = output.values() if isinstance(output, dict) else output if isinstance(output, tuple | list) else ()
    return [tensor for item in items for tensor in tensors(item)]


def same(one: Any, other: Any) -> bool:
    """Whether two results hold equal tensors, bit by bit (NaN equals NaN), and hold any at all."""
    pairs = list(zip(tensors(one), tensors(other), strict=True))
    return bool(pairs) and all(a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def trained(build: Callable[[], tuple[nn.Module, dict[str, Tensor]]], *, observed: bool) -> tuple[Any, list[Tensor], Tensor]:
    """One training pass of a fresh model: outputs, gradients of all parameters, and the random state behind it."""
    model, inputs = build()
    model.train()
    torch.manual_seed(11)
    with capture(model, lambda call: call.row_stats()) if observed else contextlib.nullcontext():
        output = model(**inputs)
    torch.stack([tensor.float().square().mean() for tensor in tensors(output)]).sum().backward()
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    return tensors(output), gradients, torch.get_rng_state()


@contextlib.contextmanager
def logged_results() -> Generator[list[Tensor]]:
    """What attention functions return while this runs, [batch, heads, queries, d_v] each. Enter it inside the capture."""
    results: list[Tensor] = []
    inside = False

    class Log(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = func(*args, **(kwargs or {}))
            if func is F.scaled_dot_product_attention and not inside:
                results.append(output.detach().clone())
            return output

    def logging(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            inside = True
            try:
                output = function(*args, **kwargs)
            finally:
                inside = False
            results.append(output[0].detach().transpose(1, 2).clone())
            return output

        return call

    from transformers.modeling_utils import AttentionInterface

    original = AttentionInterface.get_interface
    setattr(AttentionInterface, "get_interface", lambda self, name, default: logging(original(self, name, default)))  # noqa: B010
    try:
        with Log():
            yield results
    finally:
        setattr(AttentionInterface, "get_interface", original)  # noqa: B010


def recompute(call: AttentionCall) -> Tensor:
    """The call again from its record, by the reference: [batch, heads, queries, d_v]."""
    return attention(
        call.query,
        call.key,
        call.value,
        call.attn_mask,
        is_causal=call.is_causal,
        scale=call.scale,
        enable_gqa=True,
        softcap=call.softcap,
        sinks=call.sinks,
        window=call.window,
        offset=call.offset,
        impl="reference",
    )


def agrees(call: AttentionCall, result: Tensor) -> None:
    """Assert that the record computes the result, in every row that sees a key.

    A logit of size z is rounded by a few eps · z, which moves its weight by as much; an output sums weights times values.
    """
    again, stats = recompute(call), call.row_stats()
    rows = stats.count > 0
    assert rows.any()
    assert again.shape == result.shape
    largest = torch.maximum(stats.max.abs(), stats.min.abs())[rows].max()
    allowed = 8 * torch.finfo(call.query.dtype).eps * (1 + largest) * (1 + call.value.abs().max())
    torch.testing.assert_close(again[rows], result.to(again.dtype)[rows], rtol=0, atol=float(allowed))
