"""Faults below the model: it asks for the right thing, and the function that computes attention does not do it."""

import contextlib
import functools
import sys
from collections.abc import Callable, Generator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.check_faults.models import CAUSAL, Tiny
from benchmarks.check_faults.planting import Call, NotApplicableError, in_calls


@contextlib.contextmanager
def mask_ignored(tiny: Tiny) -> Generator[frozenset[str]]:
    """SDPA runs without its mask and without the causal rule."""
    if tiny.kind not in CAUSAL or tiny.config._attn_implementation != "sdpa":
        raise NotApplicableError
    plain = F.scaled_dot_product_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, *_mask: object, scale: float | None = None, **more: object) -> Tensor:
        return plain(query, key, value, scale=scale, enable_gqa=bool(more.get("enable_gqa")))

    with mock.patch.object(F, "scaled_dot_product_attention", attend):
        yield frozenset(tiny.attention)


@contextlib.contextmanager
def scale_ignored(tiny: Tiny) -> Generator[frozenset[str]]:
    """SDPA runs with its default, 1/√d, whatever scale it is given."""

    def asks(call: Call) -> Call | None:
        return call if call.sdpa and abs(call.scale / call.width**-0.5 - 1) > 1e-6 else None

    plain = F.scaled_dot_product_attention

    def attend(*given: Any, scale: float | None = None, **more: Any) -> Tensor:
        return plain(*given, **more)

    with in_calls(tiny, asks, "all") as modules, mock.patch.object(F, "scaled_dot_product_attention", attend):
        yield modules


@contextlib.contextmanager
def softcap_or_sinks_ignored(tiny: Tiny) -> Generator[frozenset[str]]:
    """The model's own eager function runs as if it were given no softcap and no sinks."""

    def asks(call: Call) -> Call | None:
        capped = call.more.get("softcap") is not None or isinstance(getattr(call.module, "sinks", None), Tensor)
        return call if capped else None

    with in_calls(tiny, asks, "all") as modules:
        code = {sys.modules[type(tiny.model.get_submodule(name)).__module__] for name in modules}
        with contextlib.ExitStack() as patches:
            for module in code:
                patches.enter_context(mock.patch.object(module, "eager_attention_forward", _bare(module.eager_attention_forward)))
            yield modules


@contextlib.contextmanager
def ignored(tiny: Tiny) -> Generator[frozenset[str]]:
    """Whichever of scale, softcap and sinks the architecture has to say something about."""
    plant = softcap_or_sinks_ignored if tiny.config._attn_implementation == "eager" else scale_ignored
    with plant(tiny) as modules:
        yield modules


def _bare(eager: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(eager)
    def attend(module: nn.Module, *given: Any, **more: Any) -> Any:
        more.pop("softcap", None)
        sinks = getattr(module, "sinks", None)
        if not isinstance(sinks, Tensor):
            return eager(module, *given, **more)
        with mock.patch.dict(module._parameters, sinks=nn.Parameter(torch.full_like(sinks, -1e4))):
            return eager(module, *given, **more)

    return attend
