"""`capture`: the context in which a model's attention calls are seen.

It must hold: outputs, gradients and random numbers are what they are without it; on the way out, also after an exception,
everything is as it was; nothing of the model stays alive through it.
"""

import contextlib
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, Self

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from attemper.capture import flash, flex, huggingface, own
from attemper.capture.eager import EagerSeam
from attemper.capture.functional import FunctionalSeam
from attemper.capture.multihead import MultiheadSeam
from attemper.capture.record import AttentionCall, Unseen
from attemper.capture.recorder import Recorder
from attemper.capture.unseen import find_unseen
from attemper.errors import ArgumentError, UnsupportedError

_running = threading.Lock()  # the seams are the process's own: one capture at a time


def capture(
    model: nn.Module,
    observer: Callable[[AttentionCall], None],
    *,
    follow_projections: bool = False,
    with_rows: bool = False,
    account: bool = True,
) -> "Capture":
    """See every attention call that a model makes, as a context manager.

        with capture(model, print) as seen:
            model(**inputs)
        seen.calls, seen.unseen()

    The model's outputs are identical to those without it. The observer runs inside the forward pass, after the call, under
    no_grad; what it raises goes through to the caller. Calls are told from the thread that entered, not again where activation
    checkpointing recomputes them in the backward pass, and a compiled model runs eagerly meanwhile.

    Args:
        model: any module. observer: called with one `AttentionCall` a call; its query is [batch, heads, queries, d].
        follow_projections: also follow q and k back to their projections (`AttentionCall.query_factor`).
        with_rows: have calls of `attemper.attention` make their record (`AttentionCall.rows`).
        account: on the way out, work out what was not seen, which reads some values off the device.

    Raises:
        ArgumentError: model is no module, or observer cannot be called. UnsupportedError, on entering: another capture runs.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError("model", type(model).__name__, "a torch.nn.Module")
    if not callable(observer):
        raise ArgumentError("observer", type(observer).__name__, "a function of one AttentionCall")
    return Capture(_Asked(model, observer, follow_projections, with_rows, account))


class _Asked(NamedTuple):
    """The arguments of `capture`."""

    model: nn.Module
    observer: Callable[[AttentionCall], None]
    follow_projections: bool
    with_rows: bool
    account: bool


class Capture:
    """What `capture` returns: how many calls were seen, and what was not.

    Args:
        asked: the arguments of `capture`.
    """

    def __init__(self, asked: _Asked) -> None:
        self._calls = 0
        self._unseen: tuple[Unseen, ...] = ()
        self._begin: _Asked | None = asked
        self._account = asked.account
        self._model: nn.Module | None = None
        self._recorder: Recorder | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if self._begin is None:
            raise UnsupportedError("this capture was used before; call capture() again for another")
        if not _running.acquire(blocking=False):
            raise UnsupportedError("another capture is running; leave it before entering one: the seams are the process's own")
        self._stack.callback(_running.release)
        try:
            model, with_rows = self._begin.model, self._begin.with_rows
            recorder = self._recorder = Recorder(model, self._begin.observer, self._begin.follow_projections)
            self._begin, self._model = None, model
            eager = EagerSeam(recorder, model)
            mode = FunctionalSeam(recorder, eager)
            recorder.switch, recorder.forget = mode.switch, eager.forget
            if is_compiled(model):
                self._stack.enter_context(torch.compiler.set_stance("force_eager"))
            self._stack.enter_context(huggingface.installed(recorder))
            self._stack.enter_context(MultiheadSeam(recorder).installed())
            self._stack.enter_context(own.installed(recorder, wants_rows=with_rows))
            self._stack.enter_context(flex.installed(recorder, model))
            self._stack.enter_context(flash.installed(recorder, model))
            self._stack.callback(register_module_forward_pre_hook(recorder.enter).remove)
            self._stack.callback(register_module_forward_hook(recorder.leave, always_call=True).remove)
            self._stack.callback(mode.switch, False)
            mode.switch(True)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._stack.close()
        assert self._recorder is not None
        assert self._model is not None
        self._calls = self._recorder.calls
        if self._account:
            self._unseen = find_unseen(self._model, self._recorder)
        self._recorder = self._model = None

    @property
    def calls(self) -> int:
        """Attention calls seen so far."""
        return self._calls if self._recorder is None else self._recorder.calls

    def unseen(self) -> tuple[Unseen, ...]:
        """Attention modules without a call that was seen, each with the reason. Ask after the forward pass."""
        if self._recorder is not None and self._model is not None:
            return find_unseen(self._model, self._recorder)
        return self._unseen


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile sits anywhere in it: hooks and seams would be traced, or skipped, by graphs made before."""
    if "torch._dynamo" not in sys.modules:
        return False
    from torch._dynamo.eval_frame import OptimizedModule

    return any(
        isinstance(module, OptimizedModule)
        or module._compiled_call_impl is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
        for module in model.modules()
    )
