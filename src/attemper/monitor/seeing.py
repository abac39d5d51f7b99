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
from attemper.monitor import stance
from attemper.monitor.forward_pass import ForwardPass
from attemper.monitor.hooks import Hook

_BUSY = (
    "a forward pass of it ran while another model was watched or captured: inside or around it, or in another thread; "
    "of models that run inside one another watch the outermost alone"
)
_TRANSFORMED = "a forward pass of it ran under a transform of torch.func, which is not measured"


class _Kind(NamedTuple):
    """What is kept of a call of the first forward pass."""

    seam: str
    self_attention: bool


class _Captured(NamedTuple):
    """A forward pass that runs, and its capture."""

    forward: ForwardPass
    capture: Capture


class Seeing:
    """Tells of the attention calls of a model, as long as it is not removed.

    Args:
        model: without wrappers. in_use: whether attemper computes its attention. observer: told of each call.
        wanted: whether calls are wanted now.

    Attributes:
        notes: modules that are not seen, with the reasons, from the first forward pass on.
        remarks: what is to be said besides, by module.
    """

    def __init__(
        self, model: nn.Module, in_use: bool, observer: Callable[[AttentionCall], None], wanted: Callable[[], bool]
    ) -> None:
        self.notes: dict[str, str] = {}
        self.remarks: dict[str, str] = {}
        self._model, self._in_use, self._observer, self._wanted = model, in_use, observer, wanted
        self._first: dict[str, list[_Kind]] | None = {}  # the calls of the first forward pass, while it runs
        self._traced: dict[str, Seen] | None = None
        self._forced = False  # whether no graph runs now
        self._pass: _Captured | None = None
        self._stack = contextlib.ExitStack()
        self._stack.callback(install())
        self._stack.callback(stance.ask, self, False)
        self._stack.callback(self._forget)
        self._stack.callback(self._break_off)
        self._stack.callback(model.register_forward_pre_hook(Hook(self._enter), prepend=True).remove)
        self._stack.callback(model.register_forward_hook(Hook(self._leave), always_call=True).remove)
        self.prepare()

    def prepare(self) -> None:
        """Get ready for the forward passes of a step: graphs that cannot tell of their calls do not run in one that is measured.

        In the first one none does: it shows what calls there are.
        """
        self._forced = self._wanted() and self._traced is None
        stance.ask(self, self._forced)

    def remove(self) -> None:
        """Put everything back."""
        self._stack.close()

    def _enter(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook of the model."""
        if torch.compiler.is_compiling():
            return
        if self._pass is not None and not self._pass.forward.over():  # it calls itself
            return
        self._break_off()
        repeated = torch._C._current_graph_task_id() != -1
        evaluated = not (module.training or torch.is_grad_enabled())
        if not self._wanted() or repeated or evaluated or self._told_by_graphs():
            return
        if torch._C._are_functorch_transforms_active():
            self.remarks[""] = _TRANSFORMED
            return
        forward = ForwardPass()
        seen = capture(module, self._observe, with_rows=self._in_use, account=self._first is not None)
        try:
            seen.__enter__()
        except UnsupportedError:
            self.remarks[""] = _BUSY
            return
        self._pass = _Captured(forward, seen)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the model, called after exceptions too."""
        if torch.compiler.is_compiling() or self._pass is None or not self._pass.forward.ends():
            return
        if self._pass.forward.raised():
            self._break_off()
            return
        seen, self._pass = self._pass.capture, None
        seen.__exit__(None, None, None)
        if self._first is not None:
            first, self._first = self._first, None
            self.notes |= {each.module: each.reason for each in seen.unseen()}
            self._trace(first)

    def _break_off(self) -> None:
        """Close a pass that did not end by itself, if there is one: the next pass is the first one again."""
        if self._pass is not None:
            seen, self._pass = self._pass.capture, None
            seen.__exit__(None, None, None)
            self._first = None if self._first is None else {}

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
