"""Seam for compiled models: Hugging Face's attention interface, in a way that torch.compile traces into its graphs.

What it must hold:
- no graph breaks, and nothing that makes a graph for one module only: a module carries a tensor, its token, which a graph takes
  as an input like any other, so that all layers of a kind share one graph;
- an operator that torch.compile does not look into sees the call when the graph runs; it writes to the token, so that no
  compiler leaves it out;
- a run in the backward pass is a recomputation, and is not told.

Other attention has no module at hand where it is called, and would need state that outlives the call, which torch.compile does
not allow under activation checkpointing: such models have to run eagerly while they are watched.
"""

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from attemper.capture.huggingface import OWN
from attemper.capture.interface import Asked, arguments, asked, form_of, indescribable, kind_of
from attemper.capture.model_code import eager_of, interface_of
from attemper.capture.record import AttentionCall
from attemper.stats import RowStats

TOKEN, FORM = "_attemper_token", "_attemper_form"

torch.library.define(
    "attemper::see",
    "(Tensor(a!) token, Tensor query, Tensor key, Tensor? mask, Tensor? scale, float number, Tensor? sinks, Tensor[] rows,"
    " bool is_causal, float? softcap, SymInt[]? window) -> ()",
)
_observers: "weakref.WeakValueDictionary[int, Seen]" = weakref.WeakValueDictionary()


class Token:
    """What a module carries. A copy of it, by copy.deepcopy or pickle, carries None: its calls are no calls of this module."""

    def __init__(self, key: int) -> None:
        self.tensor = torch.tensor([key, 0], device="cpu")

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


class Seen:
    """One module whose calls are told from graphs.

    Args:
        name: of the module. module: one that calls the interface, and no more than once in a forward pass.
        self_attention: as in `AttentionCall`. observer: told of each call.
    """

    def __init__(self, name: str, module: nn.Module, self_attention: bool, observer: Callable[[AttentionCall], None]) -> None:
        self.name, self.module, self.self_attention, self.observer = name, module, self_attention, observer
        self.put()

    def put(self) -> None:
        """Give the module its token, and how its function takes its arguments, which a compiler cannot trace."""
        chosen: Any = getattr(self.module.config, "_attn_implementation", None)
        eager: Any = eager_of(self.module)
        function = sys.modules["transformers.modeling_utils"].AttentionInterface().get_interface(chosen, eager)
        _observers[id(self)] = self
        self.module.__dict__[FORM] = form_of(kind_of(chosen, function, eager), function)
        self.module.__dict__[TOKEN] = Token(id(self))

    def remove(self) -> None:
        """Take them away; graphs made meanwhile are made anew."""
        for name in (TOKEN, FORM):
            self.module.__dict__.pop(name, None)


@torch.library.impl("attemper::see", "default")
def _see(
    token: Tensor,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scale: Tensor | None,
    number: float,
    sinks: Tensor | None,
    rows: list[Tensor],
    is_causal: bool,
    softcap: float | None,
    window: list[int] | None,
) -> None:
    seen = _observers.get(int(token[0]))  # on the CPU: nothing waits for the device
    if seen is None or torch._C._current_graph_task_id() != -1:
        return
    token[1] += 1
    call = AttentionCall(
        seen.name,
        call=0,
        order=0,
        seam="attemper" if rows else "huggingface",
        query=query,
        key=key,
        value=key,
        attn_mask=mask,
        is_causal=is_causal,
        scale=number if scale is None else scale,
        softcap=softcap,
        sinks=sinks,
        window=None if window is None else (window[0], window[1]),
        offset=max(0, key.shape[2] - query.shape[2]) if seen.self_attention else 0,
        self_attention=seen.self_attention,
        rows=RowStats(rows[0], rows[1], rows[2], sink=sinks is not None) if rows else None,
    )
    with torch.no_grad():
        seen.observer(call)


@torch.library.register_fake("attemper::see")
def _see_fake(*_: Any) -> None:
    return None


def see(module: nn.Module, found: Asked, rows: RowStats | None) -> None:
    """Put a call of a module into the graph that is being made; nothing where nobody asked for it."""
    token = module.__dict__.get(TOKEN)
    if token is None or not (module.training or torch.is_grad_enabled()):
        return
    scale = found.scale
    torch.ops.attemper.see(
        token.tensor,
        found.query.detach(),
        found.key.detach(),
        None if found.mask is None else found.mask.detach(),
        scale.detach() if isinstance(scale, Tensor) else None,
        0.0 if isinstance(scale, Tensor) else float(scale),
        None if found.sinks is None else found.sinks.detach(),
        [] if rows is None else [rows.lse.detach(), rows.entropy.detach(), rows.rest],
        found.is_causal,
        found.softcap,
        None if found.window is None else list(found.window),
    )


_installed: list[Any] = []  # the interface's own method, while somebody watches


def install() -> Callable[[], None]:
    """Let the attention interface tell of calls while graphs are made; returns what undoes it."""
    modeling = sys.modules.get("transformers.modeling_utils")
    interface = getattr(modeling, "AttentionInterface", None)
    if interface is None:
        return lambda: None
    if not _installed:
        original = interface.get_interface

        @functools.wraps(original)
        def get_interface(self: Any, attn_implementation: Any, default: Any) -> Callable[..., Any]:
            function = original(self, attn_implementation, default)
            if function in OWN or not torch.compiler.is_compiling():
                return function
            return functools.partial(_call, function)

        interface.get_interface = get_interface
        _installed.append(original)
    _installed.append(None)  # one more who watches

    def undo() -> None:
        _installed.pop()
        if len(_installed) == 1:
            interface.get_interface = _installed.pop()

    return undo


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    output = function(*args, **kwargs)
    module = args[0] if args else kwargs["module"]
    form = module.__dict__.get(FORM)
    if form is not None:
        given = arguments(form, args, kwargs)
        if indescribable(form, given) is None:
            see(module, asked(form, given), None)
    return output


def may_be_traced(module: nn.Module) -> bool:
    """Whether a module calls the attention interface, so that its calls can be told from graphs."""
    return interface_of(module) is not None and getattr(module, "config", None) is not None
