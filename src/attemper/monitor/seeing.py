"""Where a watch gets its calls from: captures of the model's training forward passes, or the graphs of a compiled model.

What it must hold:
- a forward pass in evaluation, or one that a backward pass repeats, is not told;
- a compiled model runs its graphs wherever these can tell of their calls; where they cannot, it runs eagerly, and only in the
  steps that are measured;
- what cannot be seen has a reason.
"""

import contextlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from attemper.capture import AttentionCall, Capture, capture
from attemper.capture.traced import Seen, install, may_be_traced
from attemper.capture.using.attend import MARK
from attemper.errors import UnsupportedError

_BUSY = "a forward pass of it ran inside another model that is watched or captured; watch the outermost alone"


class _Kind(NamedTuple):
    """What is kept of a call of the first forward pass."""

    seam: str
    self_attention: bool


class Seeing:
    """Tells of the attention calls of a model, as long as it is not removed.

    Args:
        model: without wrappers. in_use: whether attemper computes its attention. observer: told of each call.
        wanted: whether calls are wanted now.

    Attributes:
        notes: modules that are not seen, with the reasons, from the first forward pass on.
    """

    def __init__(
        self, model: nn.Module, in_use: bool, observer: Callable[[AttentionCall], None], wanted: Callable[[], bool]
    ) -> None:
        self.notes: dict[str, str] = {}
        self._model, self._in_use, self._observer, self._wanted = model, in_use, observer, wanted
        self._capture: Capture | None = None
        self._first: dict[str, list[_Kind]] | None = {}  # the calls of the first forward pass, while it runs
        self._traced: dict[str, Seen] | None = None
        self._forced = False  # whether no graph runs now
        self._stance = contextlib.ExitStack()
        self._stack = contextlib.ExitStack()
        self._stack.callback(install())
        self._stack.callback(self._stance.close)
        self._stack.callback(self._forget)
        self._stack.callback(model.register_forward_pre_hook(self._enter, prepend=True).remove)
        self._stack.callback(model.register_forward_hook(self._leave, always_call=True).remove)
        self.prepare()

    def prepare(self) -> None:
        """Get ready for the forward passes of a step: graphs that cannot tell of their calls do not run in one that is measured.

        In the first one none does: it shows what calls there are.
        """
        self._stance.close()
        self._forced = self._wanted() and self._traced is None
        if self._forced:
            self._stance.enter_context(torch.compiler.set_stance("force_eager"))

    def remove(self) -> None:
        """Put everything back."""
        self._stack.close()

    def _enter(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook of the model."""
        if torch.compiler.is_compiling() or self._capture is not None or not self._wanted():
            return
        repeated = torch._C._current_graph_task_id() != -1
        evaluated = not (module.training or torch.is_grad_enabled())
        if repeated or evaluated or self._told_by_graphs():
            return
        seen = capture(module, self._observe, with_rows=self._in_use, account=self._first is not None)
        try:
            seen.__enter__()
        except UnsupportedError:
            self.notes[""] = _BUSY
            return
        self._capture = seen

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the model, called after exceptions too."""
        if torch.compiler.is_compiling() or self._capture is None:
            return
        seen, self._capture = self._capture, None
        seen.__exit__(None, None, None)
        if sys.exc_info()[0] is not None and self._first is not None:  # it broke off: the next pass is the first one
            self._first = {}
        elif self._first is not None:
            first, self._first = self._first, None
            self.notes |= {each.module: each.reason for each in seen.unseen()}
            self._trace(first)

    def _observe(self, call: AttentionCall) -> None:
        if self._first is not None:
            self._first.setdefault(call.module, []).append(_Kind(call.seam, call.self_attention))
        if call.module not in self.notes:
            self._observer(call)

    def _trace(self, first: dict[str, list[_Kind]]) -> None:
        """Give every module of the first pass its token, if all of them can have one."""
        modules = {name: self._model.get_submodule(name) for name in first}
        for name, module in modules.items():
            known = MARK in module.__dict__ if self._in_use else first[name][0].seam == "huggingface"
            if len(first[name]) > 1 or not known or not may_be_traced(module):
                return
        tell = self._tell
        self._traced = {name: Seen(name, modules[name], calls[0].self_attention, tell) for name, calls in first.items()}
        _make_graphs_anew()

    def _tell(self, call: AttentionCall) -> None:
        """From a graph."""
        if self._wanted() and call.module not in self.notes:
            self._observer(call)

    def _told_by_graphs(self) -> bool:
        """Whether all modules that have tokens lie in parts that are compiled by themselves. (In a model that is compiled as a
        whole this code does not run.)
        """
        if self._forced or not self._traced or "torch._dynamo" not in sys.modules:
            return False
        compiled = [name for name, module in self._model.named_modules() if module._compiled_call_impl is not None]
        wrapped = torch._dynamo.eval_frame.OptimizedModule
        compiled += [name for name, module in self._model.named_modules() if isinstance(module, wrapped)]
        return all(any(name == part or name.startswith(f"{part}.") for part in compiled) for name in self._traced)

    def _forget(self) -> None:
        for seen in (self._traced or {}).values():
            seen.remove()
        _make_graphs_anew()


def _make_graphs_anew() -> None:
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
