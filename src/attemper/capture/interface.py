"""What a call of Hugging Face's attention interface asks for, in the words of `attemper.attention`.

Transformers passes every function the same arguments and each function uses some of them in its own way: a mask that is left
out means "causal" to one and "everything is visible" to another; sinks are passed on or read off the module. A `Form` says
which way, and is asked for once a function, since reading signatures cannot be traced by torch.compile.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Form(NamedTuple):
    """How an attention function uses its arguments.

    Attributes:
        kind: "eager", "sdpa", "flash", "flex", or "custom" for a function that somebody registered.
        softcap, position_bias: whether it takes these.
        sinks: name of the argument that carries them, "" where it reads them off its module, None where it has none.
        names: of its parameters.
    """

    kind: str
    softcap: bool
    position_bias: bool
    sinks: str | None
    names: tuple[str, ...]


class Asked(NamedTuple):
    """One call: tensors are [batch, heads, tokens, width], the mask broadcasts to [batch, heads, queries, keys].

    softcap_given and sinks_given are what the model passes to a function whose signature does not name it.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float | Tensor
    softcap: float | None
    sinks: Tensor | None
    window: tuple[int, int] | None
    dropout_p: float
    softcap_given: float | None = None
    sinks_given: Tensor | None = None


def kind_of(name: Any, function: Callable[..., Any], default: Callable[..., Any]) -> str:
    """The kind of a function that was found under a name of the interface, where `default` is the model's own eager one."""
    if function is default:
        return "eager"
    known = f"{name} {getattr(function, '__name__', '')}"
    return next((kind for kind in ("flash", "flex", "sdpa", "eager") if kind in known), "custom")


@functools.lru_cache(maxsize=256)
def form_of(kind: str, function: Callable[..., Any]) -> Form:
    """Read a function's signature, and an eager function's code for sinks that it takes from its module."""
    try:
        names = tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        names = ()
    sinks = next((name for name in ("s_aux", "sinks") if name in names), None)
    code = getattr(inspect.unwrap(function), "__code__", None)
    if sinks is None and kind == "eager" and code is not None and "sinks" in code.co_names:
        sinks = ""
    return Form(kind, "softcap" in names, "position_bias" in names, sinks, names)


def arguments(form: Form, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """By name: transformers fixes the first five, further positional ones take the function's own names."""
    names = ["module", "query", "key", "value", "attention_mask"]
    names += form.names[len(names) :]
    return dict(zip(names, args, strict=False)) | kwargs


def indescribable(form: Form, given: dict[str, Any]) -> str | None:
    """Why no `Asked` can say what a call does, if none can."""
    tensors = [given.get(name) for name in ("query", "key", "value")]
    if not isinstance(given.get("module"), nn.Module) or not all(isinstance(tensor, Tensor) for tensor in tensors):
        return "it calls the attention interface in a form that is not known"
    if any(isinstance(tensor, Tensor) and tensor.is_nested for tensor in tensors):
        return "it calls the attention interface with nested tensors"
    shapes = [tuple(tensor.shape) for tensor in tensors if isinstance(tensor, Tensor)]
    if any(len(shape) != 4 for shape in shapes) or not shapes[1][1] or shapes[0][1] % shapes[1][1]:
        return f"it calls the attention interface with shapes {shapes}, not [batch, heads, tokens, width]"
    sinks = _sinks(form, given)
    if sinks is not None and sinks.numel() != shapes[0][1]:
        return f"its sinks, {sinks.numel()} numbers for {shapes[0][1]} heads, are not one number a head"
    return None


def asked(form: Form, given: dict[str, Any]) -> Asked:
    """What a call of a function of this form computes."""
    module, query, key, value = (given[name] for name in ("module", "query", "key", "value"))
    queries, keys = query.shape[2], key.shape[2]
    passed = given.get("attention_mask")
    mask = _mask(passed, query, key)
    if form.kind == "eager" and mask is not None and mask.dtype == torch.bool:
        mask = mask.to(query.dtype)  # eager code adds it, so that it hides nothing
    is_causal = _is_causal(form, given, passed is None or (isinstance(passed, Tensor) and passed.ndim == 2), queries)
    if form.kind in ("sdpa", "custom") and is_causal and mask is None and keys > queries:
        key, value = key[:, :, :queries], value[:, :, :queries]  # an empty preallocated cache: the rest is not used
    bias = given.get("position_bias") if form.position_bias else None
    if bias is not None:
        mask = _with_bias(bias[..., : key.shape[2]], mask)
    window = given.get("sliding_window") if form.kind == "flash" else None
    scale = given.get("scaling")
    return Asked(
        query=query,
        key=key,
        value=value,
        mask=mask,
        is_causal=is_causal,
        scale=1 / math.sqrt(query.shape[-1]) if scale is None else scale,
        softcap=given.get("softcap") if form.softcap else None,
        sinks=_sinks(form, given),
        window=None if window is None else (window - 1, window - 1),
        dropout_p=given.get("dropout", 0.0) if module.training or form.kind != "eager" else 0.0,
        softcap_given=None if form.softcap else given.get("softcap"),
        sinks_given=_unnamed_sinks(form, given, query.shape[1]),
    )


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


def _is_causal(form: Form, given: dict[str, Any], open_mask: bool, queries: int) -> bool:
    """Eager functions do what their mask says; the others apply the causal rule themselves where the mask leaves it to them."""
    if form.kind in ("eager", "flex"):
        return False
    passed = given.get("is_causal")
    wanted = bool(getattr(given["module"], "is_causal", True) if passed is None else passed)
    return queries > 1 and open_mask and wanted  # the length first: traced, it is no bool, and `and` returns the last


def _with_bias(bias: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, torch.finfo(bias.dtype).min)
    return bias + mask


def _sinks(form: Form, given: dict[str, Any]) -> Tensor | None:
    """Passed on where the function takes them; an eager function may read them off its module; or there are none."""
    if form.sinks is None:
        return None
    sinks = given.get(form.sinks) if form.sinks else getattr(given["module"], "sinks", None)
    return sinks.reshape(-1) if isinstance(sinks, Tensor) else None


def _unnamed_sinks(form: Form, given: dict[str, Any], heads: int) -> Tensor | None:
    sinks = next((given[name] for name in ("s_aux", "sinks") if given.get(name) is not None), None)
    return sinks.reshape(-1) if form.sinks is None and isinstance(sinks, Tensor) and sinks.numel() == heads else None
