"""Seam: nn.MultiheadAttention, and the transformer modules of torch.nn that contain it, fused paths included.

They take a fused path in evaluation, unless a torch function mode is entered or hooks sit on their parts; fused and plain
outputs differ by rounding. So that outputs stay identical, these modules run as they are: the mode is lifted while they run,
module names come from torch's global hooks (which the fused path does not ask about), and q, k, v are projected a second time
for the record. No random number is drawn for that, so dropout stays the same.
"""

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper.capture.record import Written
from attemper.capture.recorder import Recorder

_FORWARD = inspect.signature(nn.MultiheadAttention.forward)
_FUNCTIONAL = inspect.signature(F.multi_head_attention_forward)
_LAYER = inspect.signature(nn.TransformerEncoderLayer.forward)


class MultiheadSeam:
    """Replaces the forwards of three classes of torch.nn, and the function behind them, while a capture runs."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._plain: list[nn.MultiheadAttention] = []  # those whose forward runs now
        self._told_plain = False

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Everything is put back on the way out."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_replaced(nn.MultiheadAttention, "forward", self._attention))
            stack.enter_context(_replaced(nn.TransformerEncoderLayer, "forward", self._layer))
            stack.enter_context(_replaced(nn.TransformerEncoder, "forward", self._encoder))
            stack.enter_context(_replaced(F, "multi_head_attention_forward", self._functional))
            yield

    @contextlib.contextmanager
    def _lifted(self) -> Generator[None]:
        before = self.recorder.switch(False)
        try:
            yield
        finally:
            self.recorder.switch(before)

    def _encoder(self, original: Callable[..., Any], module: nn.TransformerEncoder, *args: Any, **kwargs: Any) -> Any:
        if not self.recorder.listening:
            return original(module, *args, **kwargs)
        with self._lifted():
            return original(module, *args, **kwargs)

    def _layer(self, original: Callable[..., Any], module: nn.TransformerEncoderLayer, *args: Any, **kwargs: Any) -> Any:
        if not self.recorder.listening:
            return original(module, *args, **kwargs)
        before = self.recorder.calls
        with self._lifted():
            output = original(module, *args, **kwargs)
        if self.recorder.calls == before:  # the fused layer calls no module
            given = _LAYER.bind(module, *args, **kwargs).arguments
            source = given["src"]
            if module.norm_first:
                norm = module.norm1
                source = F.layer_norm(source, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
            inner = {"attn_mask": given.get("src_mask"), "key_padding_mask": given.get("src_key_padding_mask")}
            self._tell_fused(module.self_attn, source, inner)
        return output

    def _attention(self, original: Callable[..., Any], module: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> Any:
        if not self.recorder.listening:
            return original(module, *args, **kwargs)
        self._plain.append(module)
        before, self._told_plain = self._told_plain, False
        try:
            with self._lifted():
                output = original(module, *args, **kwargs)
            if not self._told_plain:
                given = _FORWARD.bind(module, *args, **kwargs).arguments
                self._tell_fused(module, given["query"], given)
        finally:
            self._plain.pop()
            self._told_plain = before
        return output

    def _functional(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.recorder.listening:
            return original(*args, **kwargs)
        with self.recorder.quiet():
            output = original(*args, **kwargs)
        self._told_plain = True
        module = self._plain[-1] if self._plain else None
        tell_functional(self.recorder, module, _FUNCTIONAL.bind(*args, **kwargs).arguments)
        return output

    def _tell_fused(self, module: nn.MultiheadAttention, source: Tensor, given: dict[str, Any]) -> None:
        """The fused path takes self-attention only, batch first, with masks that hide and do not add."""
        hidden = given.get("key_padding_mask")
        with torch.no_grad():
            if source.is_nested:
                lengths = source._nested_tensor_size()[:, 0].to(source.device)  # kept on the host by torch
                source = source.to_padded_tensor(0.0)
                hidden = torch.arange(source.shape[1], device=source.device) >= lengths[:, None]
            source = source.transpose(0, 1)
            inner = {
                "query": source,
                "key": source,
                "value": source,
                "num_heads": module.num_heads,
                "in_proj_weight": module.in_proj_weight,
                "in_proj_bias": module.in_proj_bias,
                "attn_mask": given.get("attn_mask"),
                "key_padding_mask": hidden,
                "need_weights": True,  # the fused path reads the mask, never the is_causal hint
                "training": False,
            }
        tell_functional(self.recorder, module, inner)


def tell_functional(recorder: Recorder, module: nn.Module | None, given: dict[str, Any]) -> None:
    """Tell of one call of `F.multi_head_attention_forward`, from its own arguments (sequence first)."""
    name = recorder.name_of(module)
    with recorder.quiet(), torch.no_grad():
        attending_itself = given["query"] is given["key"]
        query, key, value, padding = given["query"], given["key"], given["value"], given.get("key_padding_mask")
        if query.ndim == 2:
            query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
            padding = None if padding is None else padding.unsqueeze(0)
        q, k, v = _project(given, query, key, value)
        q, k, v = (_split_heads(each, given["num_heads"]) for each in (q, k, v))
        k = k if given.get("static_k") is None else given["static_k"].unflatten(0, (-1, given["num_heads"]))
        v = v if given.get("static_v") is None else given["static_v"].unflatten(0, (-1, given["num_heads"]))
        if given.get("add_zero_attn"):
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        hint = bool(given.get("is_causal")) and padding is None and not given.get("need_weights", True)
        mask = None if hint else _merge(given.get("attn_mask"), padding, q, k)
    recorder.tell(
        name,
        seam="multihead",
        query=q,
        key=k,
        value=v,
        exact=True,
        attn_mask=mask,
        is_causal=hint,
        scale=1 / math.sqrt(q.shape[-1]),
        dropout_p=given.get("dropout_p", 0.0) if given.get("training", True) else 0.0,
        self_attention=attending_itself,
        # Where weights are asked for, torch scales q and writes the product down; else it is scaled_dot_product_attention.
        written=Written(q.dtype, scaled_first=True) if given.get("need_weights", True) else None,
    )


def _project(given: dict[str, Any], query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    bias = given.get("in_proj_bias")
    biases = (None, None, None) if bias is None else bias.chunk(3)
    if given.get("use_separate_proj_weight"):
        weights = (given["q_proj_weight"], given["k_proj_weight"], given["v_proj_weight"])
    else:
        weights = given["in_proj_weight"].chunk(3)
    q, k, v = (F.linear(each, weight, b) for each, weight, b in zip((query, key, value), weights, biases, strict=True))
    if given.get("bias_k") is not None:
        k = torch.cat([k, given["bias_k"].expand(1, k.shape[1], -1)])
        v = torch.cat([v, given["bias_v"].expand(1, v.shape[1], -1)])
    return q, k, v


def _split_heads(tensor: Tensor, heads: int) -> Tensor:
    """[tokens, batch, heads · d] → [batch, heads, tokens, d]."""
    return tensor.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)


def _merge(mask: Tensor | None, padding: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """One mask (True = visible, or added to the logits) from torch's two (True = hidden, or added)."""
    (batch, heads, queries, _), keys = query.shape, key.shape[2]
    if mask is not None:
        mask = mask.reshape(1, 1, *mask.shape) if mask.ndim == 2 else mask.reshape(batch, heads, queries, -1)
    if padding is not None:
        padding = padding[:, None, None, :]
    given = [each for each in (mask, padding) if each is not None]
    if not given:
        return None
    if all(each.dtype == torch.bool for each in given):
        hidden = functools.reduce(torch.logical_or, given)
        return ~F.pad(hidden, (0, keys - hidden.shape[-1]))  # bias_k and the zero key are visible to all
    added = sum(
        torch.zeros_like(each, dtype=query.dtype).masked_fill(each, -torch.inf) if each.dtype == torch.bool else each
        for each in given
    )
    assert isinstance(added, Tensor)
    return F.pad(added, (0, keys - added.shape[-1]))


@contextlib.contextmanager
def _replaced(owner: Any, name: str, wrapper: Callable[..., Any]) -> Generator[None]:
    original = getattr(owner, name)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)
