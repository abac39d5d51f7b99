"""`Penalties`: the z-loss and the entropy floor of every attention call in a model, as one number to add to its loss.

What it must hold:
- the gradient is that of the sum that the docs state, also under gradient accumulation, autocast and activation checkpointing;
- a penalty that could not be collected is an error, never a gradient that is silently missing;
- a forward pass that raised counts for nothing, whether or not torch told of it (of a KeyboardInterrupt it does not);
- nothing of size queries × keys is kept, and nothing here waits for the device.

The rows come from attemper's own kernel, which tells listeners of each call. The forward pass keeps lse, entropy and count, and
the penalties are computed when they are asked for: what a checkpointed region saves for its backward pass must be the same when
it runs again, and there nothing of ours does.
"""

import contextlib
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from attemper.capture import AttentionCall
from attemper.capture.capturing import is_compiled
from attemper.capture.recorder import Recorder, crosses
from attemper.capture.using import Kept, Use, use
from attemper.errors import ArgumentError, UnsupportedError
from attemper.monitor.choosing import chosen, innermost, matching
from attemper.monitor.forward_pass import ForwardPass
from attemper.monitor.hooks import Hook
from attemper.nn.penalties import CountedRows, check_floor, counted, entropy_floor_of, z_loss_of
from attemper.ops import LISTENERS, Listener, Problem
from attemper.stats import RowStats

_REENTRANT = (
    "{name}: it runs under reentrant activation checkpointing, whose forward pass has no graph for the penalties to flow back "
    "through; checkpoint with use_reentrant=False (Hugging Face: gradient_checkpointing_kwargs={{'use_reentrant': False}})"
)
_COMPILED = "model: it is compiled, and penalties are collected outside the graph; train it without torch.compile"


class Penalties:
    """Penalties on the attention logits of a whole model, without a matrix of weights.

        with Penalties(model, z_loss=1e-4, entropy_floor=(0.1, 1e-2)) as penalties:
            for batch in batches:
                loss = model(batch).loss + penalties()
                loss.backward()

    A call gives Σ over the attention calls since the last one of z_loss·mean lse² + weight·mean max(0, floor − H / ln n)²: see
    `attemper.nn.z_loss` and `attemper.nn.entropy_floor`; padded queries, where the model's mask shows them, are left out.
    Forward passes in evaluation mode, without gradients, or that raised do not count. While it lasts the model is in use
    (`attemper.use`); a context manager, and `remove()` does the same as leaving it.

    Args:
        model: any module; of a DistributedDataParallel the one inside is meant.
        z_loss: factor of the z-loss, from 0 on; None: without.
        entropy_floor: (floor in [0, 1], factor from 0 on); None: without.
        layers: patterns of module names, such as `"*.self_attn"`, or None: every attention module.

    Raises:
        ArgumentError: an argument does not fit. UnsupportedError: the model is compiled.
    """

    def __init__(
        self,
        model: nn.Module,
        z_loss: float | None = 1e-4,
        entropy_floor: tuple[float, float] | None = (0.1, 1e-2),
        layers: str | Sequence[str] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ArgumentError("model", type(model).__name__, "a torch.nn.Module")
        self._z_loss = None if z_loss is None else _factor("z_loss", z_loss)
        self._floor = _floor(entropy_floor)
        if self._z_loss is None and self._floor is None:
            raise ArgumentError("z_loss", "None, and no entropy_floor either", "a factor for one of the two")
        if is_compiled(model):
            raise UnsupportedError(_COMPILED)
        self._model = innermost(model)
        self._layers = matching(self._model, layers)
        self._rows: list[CountedRows] = []
        self._before = 0  # how many of them are of passes before the one that runs
        self._pass: ForwardPass | None = None
        self._recorder: Recorder | None = None  # of the pass that runs, as are these
        self._hooks = contextlib.ExitStack()
        self._stack = contextlib.ExitStack()
        if Use.of(self._model) is None:
            self._stack.enter_context(use(self._model))
        # For good, not only in the forward pass: a call that is run again in the backward pass makes the same record.
        listener = Listener(self._hear, wants_rows=True)
        LISTENERS.append(listener)
        self._stack.callback(LISTENERS.remove, listener)
        self._stack.callback(self._model.register_forward_pre_hook(Hook(self._enter)).remove)
        self._stack.callback(self._model.register_forward_hook(Hook(self._leave), always_call=True).remove)

    def __call__(self) -> Tensor:
        """The penalties of all that ran since the last call, a 0-d tensor in float32 (float64 in a float64 model).

        Raises:
            UnsupportedError: no attention of attemper ran in training since; the message says what ran instead.
        """
        if self._pass is not None and self._pass.over():
            self._drop()  # a KeyboardInterrupt left it open
        rows = self._rows
        self.forget()
        if not rows:
            others = "; ".join(f"{each.module or 'the model'}: {each.reason}" for each in self.kept)
            raise UnsupportedError(
                "penalties: no attention was computed by attemper in training mode with gradients since the last call"
                + (f" ({others})" if others else "")
            )
        terms = [term.to(rows[0].lse.device) for each in rows for term in self._terms(each)]
        return torch.stack(terms).sum()

    @property
    def kept(self) -> tuple[Kept, ...]:
        """Attention that the penalties do not reach, each with the reason. Ask after a forward pass."""
        used = Use.of(self._model)
        return () if used is None else tuple(each for each in used.kept if chosen(each.module, self._layers))

    def forget(self) -> None:
        """Drop what has been collected since the last call, as after a forward pass that is not trained on."""
        self._rows, self._before = [], 0

    def remove(self) -> None:
        """Stop collecting, and give the model its own attention back where this replaced it."""
        self._close()
        self._stack.close()
        self.forget()

    def _terms(self, rows: CountedRows) -> list[Tensor]:
        terms = [] if self._z_loss is None else [self._z_loss * z_loss_of(rows, None)]
        if self._floor is not None:
            terms.append(self._floor[1] * entropy_floor_of(rows, self._floor[0], None, normalized=True))
        return terms

    def _enter(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook of the model."""
        if torch.compiler.is_compiling():
            return
        if self._pass is not None:
            if not self._pass.over():  # it calls itself
                return
            self._drop()  # as above
        if not module.training:
            return
        if torch._C._current_graph_task_id() != -1:  # the whole model is checkpointed, and runs again
            return
        if is_compiled(module):
            raise UnsupportedError(_COMPILED)
        self._before, self._pass = len(self._rows), ForwardPass()
        self._recorder = Recorder(module, lambda call: None, follow_projections=False)
        self._recorder.enter(module, args)
        self._hooks.callback(register_module_forward_pre_hook(self._recorder.enter).remove)
        self._hooks.callback(register_module_forward_hook(self._recorder.leave, always_call=True).remove)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the model, called after exceptions too."""
        if torch.compiler.is_compiling() or self._pass is None or not self._pass.ends():
            return
        if self._pass.raised():
            self._drop()
        self._close()

    def _drop(self) -> None:
        """Forget the pass that runs, and end it."""
        del self._rows[self._before :]
        self._close()

    def _close(self) -> None:
        self._hooks.close()
        self._pass = self._recorder = None

    def _hear(self, problem: Problem, rows: RowStats | None) -> None:
        recorder = self._recorder
        if recorder is None or rows is None or not recorder.listening or not chosen(recorder.running(), self._layers):
            return
        if torch.is_grad_enabled():
            self._rows.append(counted(rows, _query_mask(problem, recorder)))
        elif _in_reentrant_checkpoint():
            raise UnsupportedError(_REENTRANT.format(name=recorder.running() or "the model"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.remove()


def _factor(argument: str, given: object) -> float:
    if not isinstance(given, int | float) or isinstance(given, bool) or not 0.0 <= given < float("inf"):
        raise ArgumentError(argument, repr(given), "a finite factor from 0 on, such as 1e-4, or None")
    return float(given)


def _floor(given: object) -> tuple[float, float] | None:
    if given is None:
        return None
    if not isinstance(given, Sequence) or len(given) != 2:
        raise ArgumentError("entropy_floor", repr(given), "(floor, factor), such as (0.1, 1e-2), or None")
    check_floor("entropy_floor[0]", given[0], normalized=True)
    return float(given[0]), _factor("entropy_floor[1]", given[1])


@torch.no_grad()
def _query_mask(problem: Problem, recorder: Recorder) -> Tensor | None:
    """[*leading, queries], True where the query is no padding; None where nothing says that any is."""
    inputs, rules, name = problem.inputs, problem.rules, recorder.running()
    if inputs.mask is None or inputs.value is None:
        return None
    call = AttentionCall(
        name,
        0,
        0,
        "attemper",
        inputs.query,
        inputs.key,
        inputs.value,
        inputs.mask,
        rules.is_causal,
        1.0,
        window=rules.window,
        offset=rules.offset,
        self_attention=not crosses(recorder, name),
    )
    mask = call.query_mask()
    return None if mask is None else problem.restore(mask)


def _in_reentrant_checkpoint() -> bool:
    """Whether a forward pass without gradients is one that a checkpoint will run again with them."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_qualname == "CheckpointFunction.forward":  # torch's, and those of libraries that are made after it
            return True
        frame = frame.f_back
    return False
