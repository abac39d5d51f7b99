"""Seam: `F.scaled_dot_product_attention` in any module, however it was imported, and direct `F.multi_head_attention_forward`.

A torch function mode sees the one built-in function behind every name of it, with its arguments as they were given; the
function itself runs unchanged. While a mode is entered, torch switches the fused paths of its own transformer modules off,
and their outputs change by rounding; so those modules lift it (see multihead). Every other function is shown to the seam of
eager code (see eager).
"""

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from attemper.capture.eager import EagerSeam, begins
from attemper.capture.multihead import tell_functional
from attemper.capture.products import PRODUCTS
from attemper.capture.recorder import Recorder, crosses

SDPA = {
    F.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
}
_NORM = {F.layer_norm, F.rms_norm, F.normalize, torch.layer_norm, torch.rms_norm}
SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_MULTIHEAD = inspect.signature(F.multi_head_attention_forward)


class FunctionalSeam(TorchFunctionMode):
    """Tells the recorder of attention calls; every function runs as it would have.

    Args:
        eager: shown every other function that means something to it.
    """

    def __init__(self, recorder: Recorder, eager: EagerSeam) -> None:
        super().__init__()
        self.recorder = recorder
        self.eager = eager
        self.entered = False
        self._telling: dict[Any, bool] = {}

    def switch(self, on: bool) -> bool:
        """Enter or lift the mode; returns how it was. A mode that a model entered above it stays where it is."""
        before = self.entered
        if on and not before:
            self.__enter__()
            self.entered = True
        elif before and not on and _get_current_function_mode() is self:
            self.__exit__(None, None, None)
            self.entered = False
        return before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        # This runs some thousand times in a forward pass, and most of them need nothing more.
        if not torch.compiler.is_compiling() and not self.eager.followed and not self._tells(func):
            return output
        if self.recorder.listening:
            self._notice(func, args, kwargs, output)
        elif self.recorder.products is not None and getattr(func, "__name__", "") in PRODUCTS:
            self.recorder.products.append(output.dtype)
        return output

    def _tells(self, func: Any) -> bool:
        """Whether a function means something where no tensor is followed."""
        known = self._telling.get(func)
        if known is None:
            known = self._telling[func] = func in SDPA or func is _MULTIHEAD_FORWARD or func in _NORM or begins(func)
        return known

    def _notice(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if func in SDPA:
            self._tell(dict(zip(SDPA_ARGUMENTS, args, strict=False)) | kwargs, output)
        elif func is _MULTIHEAD_FORWARD:
            tell_functional(self.recorder, None, _MULTIHEAD.bind(*args, **kwargs).arguments)
        else:
            if self.recorder.follow and func in _NORM:
                self.recorder.keep("norm", output)
            self.eager.notice(func, args, kwargs, output)

    def _tell(self, given: dict[str, Any], output: Tensor) -> None:
        recorder = self.recorder
        name = recorder.running()
        query, key, value, mask = given["query"], given["key"], given["value"], given.get("attn_mask")
        if query.is_nested or key.is_nested:
            recorder.refuse(name, "it calls scaled_dot_product_attention on nested tensors, which capture does not describe")
            return
        leading = query.shape[:-3]
        if key.shape[:-3] != leading:  # torch loads sympy to broadcast shapes, which takes half a second
            leading = torch.broadcast_shapes(leading, key.shape[:-3])
        heads = (query.shape[-3],) if query.ndim > 2 else ()
        scale = given.get("scale")
        recorder.tell(
            name,
            seam="sdpa",
            query=_four(query, leading),
            key=_four(key, leading),
            value=_four(value, leading),
            attn_mask=None if mask is None else _four_of_mask(mask, leading, heads),
            is_causal=bool(given.get("is_causal", False)),
            scale=1 / math.sqrt(query.shape[-1]) if scale is None else scale,
            scale_given=scale,
            dropout_p=given.get("dropout_p", 0.0),
            self_attention=not crosses(recorder, name),
            output=_four(output, leading),
        )


_MULTIHEAD_FORWARD = F.multi_head_attention_forward


def _four(tensor: Tensor, leading: torch.Size) -> Tensor:
    """[batch, heads, tokens, width]: dimension −3 is heads, everything before it is batch."""
    if tensor.ndim < 4:
        return tensor.reshape((1,) * (4 - tensor.ndim) + tensor.shape)
    return tensor.expand(*leading, *tensor.shape[-3:]).flatten(0, -4)


def _four_of_mask(mask: Tensor, leading: torch.Size, heads: tuple[int, ...]) -> Tensor:
    if mask.ndim < 4:
        return mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    if len(leading) < 2:
        return mask
    return mask.expand(*leading, *mask.shape[-3:]).flatten(0, -4)
