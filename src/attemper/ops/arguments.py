"""The door: every argument of `attention` is checked here, once, and brought into the normal form that kernels take."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attemper.errors import ArgumentError
from attemper.kernels.spec import Inputs, Rules
from attemper.ops.autocast import under_autocast
from attemper.scales.base import LogitShape, Scale
from attemper.stats import RowStats, broadcasts_to

Window = tuple[int | None, int | None]

# Positions are int64, and sums of a few of them must be too.
_FARTHEST = 2**60

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Problem(NamedTuple):
    """A checked call: tensors and rules for a kernel, the caller's leading dimensions to give back, and the caller's scale.

    Attributes:
        scale: as it was given, of a rule its factor.
    """

    inputs: Inputs
    rules: Rules
    leading: tuple[int, ...]
    scale: float | Tensor | None

    def restore(self, tensor: Tensor, before: int = 0) -> Tensor:
        """[batch, ...] → [*leading, ...], with `before` dimensions left alone in front."""
        if len(self.leading) == 1:
            return tensor
        return tensor.reshape(*tensor.shape[:before], *self.leading, *tensor.shape[before + 1 :])

    def record(self, lse: Tensor, entropy: Tensor, rest: Tensor) -> RowStats:
        """The record of the logits, in the caller's dimensions."""
        sink = self.inputs.sinks is not None
        return RowStats(self.restore(lse), self.restore(entropy), self.restore(rest, before=1), sink=sink)


def check(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | Tensor | Scale | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window: Window | None = None,
    offset: int = 0,
) -> Problem:
    """Check the arguments of `attention` and bring them into normal form, tensors in the dtype that autocast wants.

    Raises:
        ArgumentError: naming the argument, what was given and what was expected.
    """
    query, key, value = under_autocast(query), under_autocast(key), None if value is None else under_autocast(value)
    leading = _check_tensors(query, key, value, enable_gqa)
    _check_offset(offset)
    (heads, queries, width), keys = query.shape[-3:], key.shape[-2]
    if scale is not None and isinstance(scale, Scale):  # an abstract class is slow to ask
        scale = scale.factor(LogitShape(width, heads, queries, keys, offset, device=query.device))
    batch = math.prod(leading)
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32

    def flat(tensor: Tensor) -> Tensor:
        if tensor.ndim == 4 and tensor.shape[0] == batch:
            return tensor
        return tensor.expand(*leading, *tensor.shape[-3:]).reshape(batch, *tensor.shape[-3:])

    inputs = Inputs(
        query=flat(query),
        key=flat(key),
        value=None if value is None else flat(value),
        mask=None if attn_mask is None else _mask(attn_mask, query, (*leading, heads, queries, keys)),
        scale=_scale(scale, query, (*leading, heads, queries), dtype),
        sinks=None if sinks is None else _sinks(sinks, query, heads, dtype),
    )
    if not isinstance(is_causal, bool):
        raise ArgumentError("is_causal", repr(is_causal), "True or False")
    rules = Rules(
        is_causal=is_causal,
        window=_window(window),
        offset=offset,
        softcap=_softcap(softcap, dtype),
        dropout_p=_dropout(dropout_p),
    )
    return Problem(inputs, rules, leading, scale)


def every(problem: Problem, row_stride: int) -> Problem:
    """The problem of every so many of its queries, the first of them included.

    Raises:
        ArgumentError: the stride is not a whole number above 0.
    """
    if not isinstance(row_stride, int) or isinstance(row_stride, bool) or not 0 < row_stride <= _FARTHEST:
        raise ArgumentError("row_stride", repr(row_stride), "a whole number from 1 to 2^60: 1 looks at every row")
    if row_stride == 1:
        return problem
    inputs = problem.inputs
    # A larger stride finds no more than the first row either, and torch cannot hold its product with that of the memory.
    row_stride = min(row_stride, max(inputs.query.shape[-2], 1))
    mask, scale = inputs.mask, inputs.scale
    if mask is not None and mask.shape[-2] != 1:
        mask = mask[..., ::row_stride, :]
    if scale.shape[-1] != 1:
        scale = scale[..., ::row_stride]
    inputs = inputs._replace(query=inputs.query[..., ::row_stride, :], mask=mask, scale=scale)
    return problem._replace(inputs=inputs, rules=problem.rules._replace(row_step=row_stride))


def _check_tensors(query: Tensor, key: Tensor, value: Tensor | None, enable_gqa: bool) -> tuple[int, ...]:
    _check_tensor("query", query, query)
    _check_tensor("key", key, query)
    if value is not None:
        _check_tensor("value", value, query)
    if key.shape[-1] != query.shape[-1]:
        raise ArgumentError("key", f"width {key.shape[-1]} (shape {tuple(key.shape)})", f"width {query.shape[-1]}, that of query")
    if value is not None and value.shape[-3:-1] != key.shape[-3:-1]:
        expected = f"[..., {key.shape[-3]}, {key.shape[-2]}, width]: as many heads and keys as key has"
        raise ArgumentError("value", f"shape {tuple(value.shape)}", expected)
    _check_heads(query.shape[-3], key.shape[-3], enable_gqa)
    leading = [tensor.shape[:-3] for tensor in (query, key, value) if tensor is not None]
    if all(own == leading[0] for own in leading):
        return tuple(leading[0])
    try:
        return tuple(torch.broadcast_shapes(*leading))
    except RuntimeError:
        given = " and ".join(f"{name} {tuple(own)}" for name, own in zip(("query", "key", "value"), leading, strict=False))
        raise ArgumentError("query, key, value", f"leading dimensions {given}", "ones that broadcast together") from None


def _check_tensor(name: str, tensor: Tensor, query: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise ArgumentError(name, type(tensor).__name__, "a torch.Tensor")
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
        raise ArgumentError(name, kind, "a dense tensor; pad it and pass attn_mask")
    if tensor.dtype not in _DTYPES:
        raise ArgumentError(name, str(tensor.dtype), "float32, float64, bfloat16 or float16")
    if tensor.ndim < 3:
        raise ArgumentError(name, f"shape {tuple(tensor.shape)}", "[..., heads, tokens, width], at least 3 dimensions")
    if tensor is query:
        return
    if tensor.dtype != query.dtype:
        raise ArgumentError(name, str(tensor.dtype), f"{query.dtype}, the dtype of query")
    if tensor.device != query.device:
        raise ArgumentError(name, f"a tensor on {tensor.device}", f"one on {query.device}, the device of query")
    if tensor.ndim != query.ndim:
        raise ArgumentError(name, f"shape {tuple(tensor.shape)}", f"{query.ndim} dimensions, as many as query has")


def _check_heads(heads: int, kv_heads: int, enable_gqa: bool) -> None:
    if heads == kv_heads:
        return
    if not enable_gqa:
        raise ArgumentError("key", f"{kv_heads} heads", f"{heads}, as many as query has, or enable_gqa=True")
    if kv_heads == 0 or heads % kv_heads:
        raise ArgumentError("key", f"{kv_heads} heads", f"a divisor of query's {heads} heads, for enable_gqa=True")


def _check_offset(offset: int) -> None:
    if not isinstance(offset, int) or isinstance(offset, bool) or not -_FARTHEST <= offset <= _FARTHEST:
        raise ArgumentError(
            "offset", repr(offset), "a whole number, at most 2^60 in size: the position of query 0 among the keys"
        )


def _mask(mask: Tensor, query: Tensor, shape: tuple[int, ...]) -> Tensor:
    if not isinstance(mask, Tensor):
        raise ArgumentError("attn_mask", type(mask).__name__, "a bool or float torch.Tensor, or None")
    if mask.dtype != torch.bool and mask.dtype not in _DTYPES:
        raise ArgumentError("attn_mask", str(mask.dtype), "bool (True = take part), or a float dtype (added to the logits)")
    _check_place("attn_mask", mask, query)
    return _normal_form("attn_mask", mask, shape, trailing=3, meaning="[..., heads, queries, keys]")


def _scale(scale: float | Tensor | None, query: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if scale is None:
        width = query.shape[-1]
        scale = 1.0 / math.sqrt(width) if width else 1.0
    if isinstance(scale, Tensor):
        if not scale.dtype.is_floating_point:
            raise ArgumentError("scale", f"a tensor of {scale.dtype}", "a floating-point tensor")
        _check_place("scale", scale, query)
        if scale.ndim == 1:
            if scale.shape[0] != shape[-2]:
                expected = f"({shape[-2]},): one factor for each head of query"
                raise ArgumentError("scale", f"a 1-D tensor of shape {tuple(scale.shape)}", expected)
            scale = scale.unsqueeze(-1)
        return _normal_form("scale", scale.to(dtype), shape, trailing=2, meaning="[..., heads, queries]")
    if not _is_number(scale) or not abs(scale) <= torch.finfo(dtype).max:
        expected = "a finite number, a tensor, or None for 1/sqrt(width of query), or a rule of attemper.scales"
        raise ArgumentError("scale", repr(scale), f"{expected}; in {dtype}")
    return query.new_full((1, 1, 1), float(scale), dtype=dtype)


def _normal_form(name: str, tensor: Tensor, shape: tuple[int, ...], *, trailing: int, meaning: str) -> Tensor:
    """[batch or 1, *trailing dimensions or 1]: the tensor aligned to `shape` from the right, its leading dimensions as one."""
    if not broadcasts_to(tensor.shape, shape):
        raise ArgumentError(name, f"shape {tuple(tensor.shape)}", f"one that broadcasts to {meaning} = {shape}")
    aligned = tensor.reshape(*(1,) * (len(shape) - tensor.ndim), *tensor.shape)
    own = aligned.shape[:-trailing]
    if math.prod(own) == 1:
        return aligned.reshape(1, *aligned.shape[-trailing:])
    leading = shape[:-trailing]
    return aligned.expand(*leading, *aligned.shape[-trailing:]).reshape(math.prod(leading), *aligned.shape[-trailing:])


def _sinks(sinks: Tensor, query: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    if not isinstance(sinks, Tensor):
        raise ArgumentError("sinks", type(sinks).__name__, "a float torch.Tensor, or None")
    if sinks.shape != (heads,) or not sinks.dtype.is_floating_point:
        raise ArgumentError(
            "sinks", f"{sinks.dtype} of shape {tuple(sinks.shape)}", f"a float tensor of shape ({heads},), one logit a head"
        )
    _check_place("sinks", sinks, query)
    return sinks.to(dtype)


def _check_place(name: str, tensor: Tensor, query: Tensor) -> None:
    if tensor.layout != torch.strided:
        raise ArgumentError(name, f"layout {tensor.layout}", "a dense tensor")
    if tensor.device != query.device:
        raise ArgumentError(name, f"a tensor on {tensor.device}", f"one on {query.device}, the device of query")


def _window(window: Window | None) -> Window | None:
    if window is None:
        return None
    valid = isinstance(window, Sequence) and len(window) == 2 and all(side is None or _is_count(side) for side in window)
    if not valid:
        raise ArgumentError("window", repr(window), "(left, right), each a whole number from 0 or None for no limit, or None")
    # A side beyond every offset is no limit; a number of any size may say so.
    left, right = (None if side is None or side > 4 * _FARTHEST else side for side in window)
    return None if left is None and right is None else (left, right)


def _is_count(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0


def _is_number(thing: object) -> bool:
    return isinstance(thing, int | float) and not isinstance(thing, bool)


def _softcap(softcap: float | None, dtype: torch.dtype) -> float | None:
    if softcap is None:
        return None
    # Beyond the dtype's range the cap would become 0 or infinite there, and tanh(z / cap)·cap NaN.
    if not _is_number(softcap) or not torch.finfo(dtype).tiny <= softcap <= torch.finfo(dtype).max:
        raise ArgumentError("softcap", repr(softcap), f"a finite number above 0, or None for no cap; in {dtype}")
    return float(softcap)


def _dropout(dropout_p: float) -> float:
    if not _is_number(dropout_p) or not 0.0 <= dropout_p <= 1.0:
        raise ArgumentError("dropout_p", repr(dropout_p), "a probability in [0, 1]")
    return float(dropout_p)
