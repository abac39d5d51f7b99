"""Seam: the functions of the package `flash_attn`, where a model brought it in. The package itself is never imported here.

Each is replaced where the model's code finds it, and told from its own arguments. Its causal rule is aligned at the end: the last
query sees the last key. Packed sequences of different lengths are spread out, and a mask hides what is not theirs.
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

from attemper.capture.places import replaced
from attemper.capture.recorder import Recorder, crosses

_PACKAGES = ("flash_attn", "flash_attn_interface")
_NAMES = (
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
)


@contextlib.contextmanager
def installed(recorder: Recorder, model: nn.Module) -> Generator[None]:
    """Listen to the functions of flash_attn, if it was imported at all."""
    if not any(package in sys.modules for package in _PACKAGES):
        yield
        return
    packages = [
        module for name, module in list(sys.modules.items()) if name.partition(".")[0] in _PACKAGES and module is not None
    ]
    functions = {id(each): name for module in packages for name in _NAMES if callable(each := getattr(module, name, None))}
    if not functions:
        yield
        return

    def tell(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        bound = _signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        _tell(recorder, functions[id(function)], bound.arguments)

    with replaced(recorder, model, lambda thing: id(thing) in functions, tell, packages):
        yield


@functools.lru_cache(maxsize=64)
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def _tell(recorder: Recorder, function: str, given: dict[str, Any]) -> None:
    name = recorder.running()
    unread = [each for each in ("rotary_cos", "block_table", "cache_batch_idx", "cache_leftpad") if given.get(each) is not None]
    if unread:
        recorder.refuse(name, f"it calls {function} with {unread[0]}, which capture does not describe")
        return
    left, right = (None if side < 0 else side for side in given.get("window_size") or (-1, -1))
    causal = bool(given.get("causal", False))
    with recorder.quiet(), torch.no_grad():
        query, key, value = (each.detach() for each in _operands(function, given))
        rules: dict[str, Any] = {"is_causal": causal, "attn_mask": None}
        if "cu_seqlens" in given or "cu_seqlens_q" in given:
            query, key, value, shift, inside = _spread_out(query, key, value, given)
        elif function == "flash_attn_with_kvcache" and given.get("cache_seqlens") is not None:
            lengths = torch.as_tensor(given["cache_seqlens"], device=query.device).reshape(-1, 1, 1).expand(query.shape[0], 1, 1)
            lengths = lengths + (0 if given.get("k") is None else given["k"].shape[1])
            shift, inside = lengths - query.shape[1], torch.arange(key.shape[1], device=query.device) < lengths
        else:
            shift, inside = key.shape[1] - query.shape[1], None
        slopes = given.get("alibi_slopes")
        if inside is None:
            rules |= {"offset": shift, "window": None if left is None and right is None else (left, right)}
        if inside is not None or slopes is not None:
            rules |= _mask(query.shape[1], key.shape[1], shift, inside, causal, (left, right), slopes)
    scale, softcap = given.get("softmax_scale"), given.get("softcap")
    recorder.tell(
        name,
        seam="flash",
        query=query.transpose(1, 2),
        key=key.transpose(1, 2),
        value=value.transpose(1, 2),
        scale=1 / math.sqrt(query.shape[-1]) if scale is None else scale,
        scale_given=scale,
        softcap=softcap or None,  # 0 means none there
        dropout_p=given.get("dropout_p", 0.0),
        self_attention=not crosses(recorder, name),
        **rules,
    )


def _operands(function: str, given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as [batch, tokens, heads, d], or [tokens of all sequences, heads, d]; packed ones lie side by side at −3."""
    if "qkv" in given:
        return given["qkv"].unbind(-3)
    if "kv" in given:
        return given["q"], *given["kv"].unbind(-3)
    if function == "flash_attn_with_kvcache":
        return given["q"], given["k_cache"], given["v_cache"]
    return given["q"], given["k"], given["v"]


def _spread_out(
    query: Tensor, key: Tensor, value: Tensor, given: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """[batch, longest, heads, d] each; by how much keys outnumber queries, [batch, 1, 1]; and which pairs are no filling."""
    ends = [given.get("cu_seqlens", given.get(f"cu_seqlens_{side}")) for side in "qk"]
    longest = [given.get("max_seqlen", given.get(f"max_seqlen_{side}")) for side in "qk"]
    starts, lengths, places, real = [], [], [], []
    for end, size in zip(ends, longest, strict=True):
        starts.append(end[:-1, None])
        lengths.append((end[1:] - end[:-1])[:, None])
        places.append(torch.arange(size, device=query.device))
        real.append(places[-1] < lengths[-1])
    index = [(start + place) * inside for start, place, inside in zip(starts, places, real, strict=True)]
    inside = real[0][:, :, None] & real[1][:, None, :]
    return query[index[0]], key[index[1]], value[index[1]], (lengths[1] - lengths[0])[:, :, None], inside


def _mask(
    queries: int,
    keys: int,
    shift: int | Tensor,
    inside: Tensor | None,
    causal: bool,
    window: tuple[int | None, int | None],
    slopes: Tensor | None,
) -> dict[str, Any]:
    """The rules of position written out, [batch or 1, heads or 1, queries, keys], where they differ by sequence or are a bias."""
    device = inside.device if inside is not None else slopes.device if slopes is not None else None
    row, column = torch.arange(queries, device=device)[:, None], torch.arange(keys, device=device)
    distance = column - row - shift  # 0 where the last query meets the last key
    distance = distance if distance.ndim == 3 else distance[None]
    if inside is None:
        assert slopes is not None
        return {"attn_mask": _alibi(slopes, distance)}
    visible = inside & (distance <= 0) if causal else inside.expand(distance.shape)
    left, right = window
    visible = visible if left is None else visible & (distance >= -left)
    visible = (visible if right is None else visible & (distance <= right))[:, None]
    mask = visible if slopes is None else torch.where(visible, _alibi(slopes, distance), -torch.inf)
    return {"attn_mask": mask, "is_causal": False}


def _alibi(slopes: Tensor, distance: Tensor) -> Tensor:
    """−slope · |distance|, [batch or 1, heads, queries, keys]; slopes: [heads] or [batch, heads]."""
    return -slopes.reshape(-1, slopes.shape[-1], 1, 1) * distance.abs()[:, None]
