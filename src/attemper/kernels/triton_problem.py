"""What the Triton kernels share outside of Triton: whether they can run here, what they take, and how a problem is handed over.

What it must hold:
- Triton itself is not imported here, so that whoever merely looks at what is available does not wait for it;
- both directions get the problem by the same names, so that a mask or a position means the same in each;
- whatever varies from call to call without changing the code is no part of what a kernel is compiled for.
"""

import os
from collections.abc import Callable
from importlib.machinery import PathFinder
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attemper.kernels.spec import Inputs, Rules, invisible_below

# Figures of a row that the forward pass keeps for the backward pass, [FIGURES, batch, heads, queries] in float32:
# 0: the shift, the largest of the row's logits and its sink (0 where that is −inf); 1: log Σ e^(z − shift), the sink included (0
# where nothing is visible); 2: a pivot, a finite number near the row's products, 0 under a cap or beside a sink.
FIGURES = 3

WIDEST = 256  # of a head
_MOST_TOKENS = 2**30  # places among queries and keys are 32-bit numbers; offsets in memory are not
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

NO_MASK, BOOL_MASK, FLOAT_MASK = 0, 1, 2

# Arguments of a kernel that it is not compiled anew for.
UNSPECIALIZED = (
    *("queries", "keys", "heads", "groups", "row_step", "low", "high"),
    *("softcap", "inverse_softcap", "mask_limit", "seed_low", "seed_high", "threshold", "keep_factor"),
)


class Launch(NamedTuple):
    """One call of a Triton kernel: the kernel, how many programs, what it is given by name, and how it is compiled.

    options: num_warps and num_stages.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]

    def run(self) -> None:
        """Start it on the current stream of the GPU on which the tensors are: Triton takes the current one, whoever owns them."""
        kernel: Callable[..., Any] = self.kernel[self.grid]
        given = next(each for each in self.arguments.values() if isinstance(each, Tensor))
        with torch.cuda.device_of(given):  # of a tensor elsewhere it is none
            kernel(**self.arguments, **self.options)


def available() -> bool:
    """Whether Triton is installed; it is looked for where packages are, and not loaded."""
    return PathFinder.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton will interpret its kernels, on tensors of the CPU: TRITON_INTERPRET, read when Triton is imported."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def describe() -> str:
    """What is here, in a few words."""
    if not available():
        return "Triton, for GPUs; not installed here: pip install 'attemper[triton]'"
    where = "interpreted, on the CPU" if interpreted() else "for GPUs"
    return f"Triton, {where}; float32, bfloat16 and float16, heads up to {WIDEST} wide, O(N·d) memory"


def refusal(inputs: Inputs, *, seen: bool = True) -> str:
    """What the kernels do not take of these tensors, "" if they take them all.

    Args:
        seen: whether these are the very tensors; otherwise they stand for others on the same device.
    """
    device = inputs.query.device
    if device.type == "cpu" and not interpreted():
        return "a tensor on cpu, except under its interpreter (TRITON_INTERPRET=1)"
    if device.type not in ("cuda", "cpu") and (seen or device.type != "meta"):
        return f"a tensor on {device}"
    if inputs.query.dtype not in _DTYPES:
        return f"{inputs.query.dtype}"
    widest = max(tensor.shape[-1] for tensor in (inputs.query, inputs.value) if tensor is not None)
    if widest > WIDEST:
        return f"a width of {widest}, above {WIDEST}"
    if max(inputs.query.shape[-2], inputs.key.shape[-2]) > _MOST_TOKENS:
        return f"more than {_MOST_TOKENS} tokens"
    if not seen:
        return ""
    for tensor in inputs:
        if tensor is not None and tensor.is_neg():
            return "a tensor whose sign is yet to be turned (see torch.Tensor.resolve_neg)"
        if tensor is not None and tensor._is_zerotensor():
            return "a tensor of noughts without memory (torch._efficientzerotensor)"
    return ""


def arguments(inputs: Inputs, rules: Rules) -> dict[str, Any]:
    """The problem as both directions take it, by the names of their arguments.

    Tensors with the strides of each dimension, 0 where one element stands for all; sizes; positions as `low` and `high`, so that
    query i sees keys i·row_step + low ≤ j ≤ i·row_step + high; the generator's seed and threshold as the bits of 32-bit numbers.
    Capitals are fixed when a kernel is compiled.
    """
    query, key, value, mask, scale, sinks = inputs
    _, heads, queries, keys = inputs.shape
    low, high = _positions(rules, queries, keys)
    threshold = round(rules.dropout_p * 2**32)
    nothing_kept = threshold >= 2**32
    mask_dtype = torch.bool if mask is None else mask.dtype
    floats = mask_dtype != torch.bool
    softcap = rules.softcap
    # So large a cap changes no logit that float32 could tell, and its inverse would be no normal number.
    capped = softcap is not None and softcap < 2.0**125
    value_width = 0 if value is None else value.shape[-1]
    return {
        "query": query,
        "key": key,
        "value": value,
        "mask": mask if floats or mask is None else mask.view(torch.uint8),
        "scale": scale,
        "sinks": None if sinks is None else sinks.contiguous(),
        **_strides("query", query, ("batch", "head", "row", "column")),
        **_strides("key", key, ("batch", "head", "row", "column")),
        **_strides("value", value, ("batch", "head", "row", "column")),
        **_strides("mask", mask, ("batch", "head", "row", "column")),
        **_strides("scale", scale, ("batch", "head", "row")),
        "queries": queries,
        "keys": keys,
        "heads": heads,
        "groups": heads // max(key.shape[1], 1),
        "row_step": rules.row_step,
        "low": low,
        "high": high,
        "softcap": softcap if capped else 1.0,
        "inverse_softcap": 1.0 / softcap if capped else 1.0,
        "mask_limit": invisible_below(mask_dtype, torch.float32) if floats else 0.0,
        "seed_low": _signed(rules.seed),
        "seed_high": _signed(rules.seed >> 32),
        "threshold": _signed(0 if nothing_kept else threshold),
        "keep_factor": 0.0 if nothing_kept else 1.0 / (1.0 - rules.dropout_p),
        "WIDTH": query.shape[-1],
        "VALUE_WIDTH": value_width,
        "BLOCK_D": block_width(query.shape[-1]),
        "BLOCK_V": block_width(value_width),
        "MASK": FLOAT_MASK if floats else NO_MASK if mask is None else BOOL_MASK,
        "LEFT": rules.sides[0] is not None,
        "RIGHT": rules.sides[1] is not None,
        "SOFTCAP": capped,
        "DROPOUT": rules.dropout_p > 0.0,
    }


def block_width(width: int) -> int:
    """The width of a tile in memory on the device: the next power of two, from 16 on."""
    return max(16, 1 << max(width - 1, 0).bit_length())


def _positions(rules: Rules, queries: int, keys: int) -> tuple[int, int]:
    """(low, high), brought so near that they are 32-bit numbers and still mean the same for these queries and keys."""
    nearest = -(max(queries, 1) - 1) * rules.row_step - 1
    left, right = rules.sides
    low = 0 if left is None else rules.offset - left
    high = 0 if right is None else rules.offset + right
    return max(nearest, min(low, keys)), max(nearest, min(high, keys))


def _strides(name: str, tensor: Tensor | None, dimensions: tuple[str, ...]) -> dict[str, int]:
    if tensor is None:
        return {f"{name}_{dimension}": 0 for dimension in dimensions}
    spread = (0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return {f"{name}_{dimension}": stride for dimension, stride in zip(dimensions, spread, strict=True)}


def _signed(number: int) -> int:
    """The low 32 bits, read as a signed number: so it has one type in Triton, whatever it is."""
    low = number & 0xFFFFFFFF
    return low - 2**32 if low >= 2**31 else low
