"""Seam: the attention interface of Hugging Face transformers (5.0 and later).

A model asks `AttentionInterface.get_interface(name, its own eager function)` for the function to call. Capture wraps what
this returns and leaves the name alone. Registering a function under a name of our own, and switching the model to it, was
weighed and dropped: model code compares names ("eager", "sdpa") to choose masks and branches, so each comparison would have
to be forged, the mask function with it, and every nested config restored. Here the model builds the mask that it always
builds, the function that it always calls gets the very arguments that it always gets, and there is nothing to restore in the
model. Identity is tested on every architecture of the sweep all the same.
"""

import contextlib
import functools
import inspect
import math
import sys
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor, nn

from attemper.capture.functional import crosses
from attemper.capture.recorder import Recorder


@contextlib.contextmanager
def installed(recorder: Recorder) -> Generator[None]:
    """Wrap what `get_interface` returns, if transformers is loaded at all (no model of its can be there otherwise)."""
    modeling = sys.modules.get("transformers.modeling_utils")
    interface = getattr(modeling, "AttentionInterface", None)
    original = getattr(interface, "get_interface", None)
    if interface is None or original is None:
        yield
        return

    @functools.wraps(original)
    def get_interface(self: Any, attn_implementation: Any, default: Any) -> Callable[..., Any]:
        function = original(self, attn_implementation, default)
        return functools.partial(_call, recorder, _kind(attn_implementation, function, default), function)

    interface.get_interface = get_interface
    try:
        yield
    finally:
        interface.get_interface = original


def _call(recorder: Recorder, kind: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not recorder.listening:
        return function(*args, **kwargs)
    given = _arguments(function, args, kwargs)
    reason = _indescribable(given)
    if reason is not None:
        recorder.refuse(recorder.name_of(given.get("module")), reason)
        return function(*args, **kwargs)
    with recorder.quiet():  # sdpa inside is this same call
        output = function(*args, **kwargs)
    _tell(recorder, kind, function, given, output)
    return output


def _kind(name: Any, function: Callable[..., Any], default: Callable[..., Any]) -> str:
    """One of "eager", "sdpa", "flash", "flex", or "custom" for a function that somebody registered."""
    if function is default:
        return "eager"
    known = f"{name} {getattr(function, '__name__', '')}"
    return next((kind for kind in ("flash", "flex", "sdpa", "eager") if kind in known), "custom")


@functools.lru_cache(maxsize=256)
def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """By name: transformers fixes the first five, further positional ones take the function's own names."""
    names = ["module", "query", "key", "value", "attention_mask"]
    signature = _signature(function)
    if signature is not None:
        names += list(signature.parameters)[len(names) :]
    return dict(zip(names, args, strict=False)) | kwargs


def _takes(function: Callable[..., Any], name: str) -> bool:
    signature = _signature(function)
    return signature is not None and name in signature.parameters


def _indescribable(given: dict[str, Any]) -> str | None:
    tensors = [given.get(name) for name in ("query", "key", "value")]
    if not isinstance(given.get("module"), nn.Module) or not all(isinstance(tensor, Tensor) for tensor in tensors):
        return "it calls the attention interface in a form that capture does not know"
    shapes = [tuple(tensor.shape) for tensor in tensors if isinstance(tensor, Tensor)]
    if any(len(shape) != 4 for shape in shapes) or not shapes[1][1] or shapes[0][1] % shapes[1][1]:
        return f"it calls the attention interface with shapes {shapes}, not [batch, heads, tokens, width]"
    sinks = given.get("sinks")
    if isinstance(sinks, Tensor) and sinks.numel() != shapes[0][1]:
        return f"its sinks, of shape {tuple(sinks.shape)}, are not one number a head"
    return None


def _tell(recorder: Recorder, kind: str, function: Callable[..., Any], given: dict[str, Any], output: Any) -> None:
    module, query, key, value = (given[name] for name in ("module", "query", "key", "value"))
    name = recorder.name_of(module)
    queries, keys = query.shape[2], key.shape[2]
    cross = crosses(recorder, name) or bool(getattr(module, "is_cross_attention", False))
    with recorder.quiet(), torch.no_grad():
        passed = given.get("attention_mask")
        mask = _mask(passed, query, key)
        is_causal = _is_causal(kind, given, passed is None or (isinstance(passed, Tensor) and passed.ndim == 2), queries)
        if kind in ("sdpa", "custom") and is_causal and mask is None and keys > queries:
            key, value = key[:, :, :queries], value[:, :, :queries]  # an empty preallocated cache: the rest is not used
            keys = queries
        bias = given.get("position_bias") if _takes(function, "position_bias") else None
        if bias is not None:
            mask = _with_bias(bias[..., :keys], mask)
        sinks = _sinks(kind, function, given)
    window = given.get("sliding_window") if kind == "flash" else None
    scale = given.get("scaling")
    training = bool(module.training)
    recorder.tell(
        name,
        seam="huggingface",
        query=query,
        key=key,
        value=value,
        attn_mask=mask,
        is_causal=is_causal,
        scale=1 / math.sqrt(query.shape[-1]) if scale is None else scale,
        scale_given=scale,
        softcap=given.get("softcap") if _takes(function, "softcap") else None,
        sinks=sinks,
        window=None if window is None else (window - 1, window - 1),
        # Keys beyond the queries were there before them. (In a preallocated cache some come after; no rule uses it then.)
        offset=0 if cross else max(0, keys - queries),
        dropout_p=given.get("dropout", 0.0) if training or kind != "eager" else 0.0,
        self_attention=not cross,
        output=_output(output, (*query.shape[:3], value.shape[3])),
    )


def _output(returned: Any, shape: tuple[int, ...]) -> Tensor | None:
    """[batch, heads, queries, d_v]; the interface returns it with heads behind queries."""
    output = returned[0] if isinstance(returned, tuple) and returned else returned
    if not isinstance(output, Tensor) or output.ndim != 4 or output.transpose(1, 2).shape != shape:
        return None
    return output.transpose(1, 2)


def _mask(mask: Any, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask as the function uses it: [batch or 1, heads or 1, queries, keys]."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor):  # flex attention's BlockMask: a rule, written out
        from torch.nn.attention.flex_attention import create_mask

        return create_mask(mask.mask_mod, mask.shape[0], mask.shape[1], query.shape[2], key.shape[2], device=str(query.device))
    if mask.ndim == 2:  # flash attention gets the padding mask of the tokens
        return mask[:, None, None, -key.shape[2] :].bool()
    return mask[..., : key.shape[2]]


def _is_causal(kind: str, given: dict[str, Any], open_mask: bool, queries: int) -> bool:
    """Eager functions do what their mask says; the others apply the causal rule themselves where the mask leaves it to them."""
    passed = given.get("is_causal")
    asked = bool(getattr(given["module"], "is_causal", True) if passed is None else passed)
    if kind in ("eager", "flex"):
        return False
    return asked and open_mask and queries > 1


def _with_bias(bias: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, torch.finfo(bias.dtype).min)
    return bias + mask


def _sinks(kind: str, function: Callable[..., Any], given: dict[str, Any]) -> Tensor | None:
    """Passed on where the function takes them; an eager function reads them off its module, or there are none."""
    for name in ("s_aux", "sinks"):
        if _takes(function, name) and isinstance(given.get(name), Tensor):
            return given[name].reshape(-1)
    code = getattr(inspect.unwrap(function), "__code__", None)
    if kind == "eager" and code is not None and "sinks" in code.co_names:
        sinks = getattr(given["module"], "sinks", None)
        return None if sinks is None else sinks.reshape(-1)
    return None
