"""`watch`: statistics of a model's attention while it trains.

What it must hold:
- the run is what it would be without it: outputs, gradients, random numbers (mode "observe");
- a row is counted once, however often a forward pass is repeated: recomputation under activation checkpointing is not seen,
  since it happens in the backward pass, and evaluation is not either;
- nothing waits for the device between two calls of `step`; `step` reads everything back at once;
- whatever cannot be seen is named; nothing of ours stops a run but a caller's own `on_alarm`.
"""

import contextlib
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from importlib.metadata import version
from types import TracebackType
from typing import Literal, Self

import torch
from torch import Tensor, nn

from attemper.capture import AttentionCall, Unseen
from attemper.capture.using import use
from attemper.errors import ArgumentError, AttemperError, UnsupportedError
from attemper.monitor.measuring import Measured, measure
from attemper.monitor.records import Alarm, LayerRecord, RunInfo, StepRecord
from attemper.monitor.seeing import Seeing
from attemper.monitor.trackers import Tracker

Mode = Literal["observe", "use"]
_watches: weakref.WeakKeyDictionary[nn.Module, "Watch"] = weakref.WeakKeyDictionary()


def watch(
    model: nn.Module,
    *,
    every: int = 1,
    layers: str | Sequence[str] | None = None,
    mode: Mode = "observe",
    rows: int = 1,
    trackers: Sequence[Tracker] = (),
    on_alarm: Callable[[Alarm], None] | None = None,
    history: int = 1000,
) -> "Watch":
    """Measure the attention logits of a model while it trains.

        with attemper.watch(model, trackers=[...]) as watching:
            for batch in data:
                loss = model(batch); loss.backward(); optimizer.step(); optimizer.zero_grad()
                watching.step(loss=loss.item())

    Every forward pass of the model in training counts (one in evaluation mode without gradients does not), as many as there are
    between two calls of `step`. See docs/watch.md.

    Args:
        model: any module; of a DistributedDataParallel or a compiled module the one inside is meant.
        every: steps from one record to the next; between them nothing is measured.
        layers: patterns of module names ("*.self_attn", "encoder.*"), or None: every attention module.
        mode: "observe": the model's own kernel computes, and the statistics come from a pass of their own over q and k.
            "use": attemper's kernel computes (see `attemper.use`), and the statistics come with it.
        rows: in mode "observe", the stride of the rows that are measured: 8 looks at every eighth query and costs an eighth.
        trackers: where the records go.
        on_alarm: called with each alarm, on every process; it may raise to end the run.
        history: how many logged steps `frame` looks back on.

    Raises:
        ArgumentError: an argument does not fit; the message names it. UnsupportedError: the model is watched already, or, in
            mode "use", is in use.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError("model", type(model).__name__, "a torch.nn.Module")
    for name, number in (("every", every), ("rows", rows), ("history", history)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ArgumentError(name, repr(number), "a whole number above 0")
    if mode not in ("observe", "use"):
        raise ArgumentError("mode", repr(mode), '"observe" or "use"')
    if mode == "use" and rows != 1:
        raise ArgumentError("rows", rows, 'nothing in mode "use", whose kernel measures every row; or mode="observe"')
    root = _innermost(model)
    if Watch.of(root) is not None:
        raise UnsupportedError("model: it is watched already; remove() what watch() returned for it (Watch.of(model)) first")
    return Watch(root, every, _patterns(root, layers), mode, rows, tuple(trackers), on_alarm, history)


class Watch:
    """What `watch` returns. The arguments are those of `watch`."""

    def __init__(
        self,
        model: nn.Module,
        every: int,
        layers: tuple[str, ...] | None,
        mode: Mode,
        rows: int,
        trackers: tuple[Tracker, ...],
        on_alarm: Callable[[Alarm], None] | None,
        history: int,
    ) -> None:
        self.every, self.mode, self.rows = every, mode, rows
        self.last: StepRecord | None = None
        self.records: deque[StepRecord] = deque(maxlen=history)
        self._model, self._layers, self._trackers, self._on_alarm = model, layers, trackers, on_alarm
        self._next = 0
        self._slots: dict[tuple[str, int], Measured] = {}
        self._maxima: dict[str, Tensor] | None = None
        self._stack = contextlib.ExitStack()
        if mode == "use":
            self._stack.enter_context(use(model))
        self._seeing = Seeing(model, mode == "use", self._measure, self._wants)
        self._stack.callback(self._seeing.remove)
        self._order = {name: place for place, (name, _) in enumerate(model.named_modules())}
        _watches[model] = self
        info = RunInfo(type(model).__name__, mode, every, rows, time.time(), version("attemper"))
        for tracker in trackers:
            tracker.begin(info)

    @staticmethod
    def of(model: nn.Module) -> "Watch | None":
        """The watch of a model, or None."""
        return _watches.get(_innermost(model))

    def step(self, step: int | None = None, **scalars: float) -> StepRecord | None:
        """End a step, after `optimizer.step()`. Every process calls it.

        Args:
            step: its number; None: one more than the last, from 0.
            scalars: numbers to keep beside the record, such as the loss.

        Returns:
            The record of the step, None where it is not logged.
        """
        number = self._next if step is None else step
        logged, slots = self._due, self._slots
        self._next, self._slots = number + 1, {}
        self._seeing.prepare()
        if not logged:
            return None
        found = [LayerRecord(layer, call, *each) for (layer, call), each in sorted(slots.items(), key=self._place)]
        record = StepRecord(number, time.time(), tuple(found), (), {name: float(value) for name, value in scalars.items()})
        self.last = record
        self.records.append(record)
        for tracker in self._trackers:
            tracker.log(record)
        return record

    def maxima(self) -> dict[str, Tensor]:
        """Of each layer, float64 [heads] on the CPU: the largest |scale·q·k| since this was asked last. Every process calls it.

        From the first time on, the maxima of every training step are measured, not only of the logged ones.
        """
        found = {} if self._maxima is None else self._maxima
        self._maxima = {}
        self._seeing.prepare()
        return {layer: maximum.cpu() for layer, maximum in found.items()}

    def unseen(self) -> tuple[Unseen, ...]:
        """Attention modules that are not measured, each with the reason. Ask after a forward pass."""
        notes = self._seeing.notes
        return tuple(Unseen(name, notes[name]) for name in sorted(notes, key=lambda name: self._order.get(name, 0)))

    def remove(self) -> None:
        """Stop watching, and close the trackers. A second time does nothing."""
        if Watch.of(self._model) is not self:
            return
        del _watches[self._model]
        self._stack.close()
        for tracker in self._trackers:
            tracker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.remove()

    @property
    def _due(self) -> bool:
        return self._next % self.every == 0

    def _place(self, item: tuple[tuple[str, int], Measured]) -> tuple[int, int]:
        (layer, call), _ = item
        return self._order.get(layer, 0), call

    def _measure(self, call: AttentionCall) -> None:
        layer = call.module
        if not (self._layers is None or any(fnmatchcase(layer, pattern) for pattern in self._layers)):
            return
        try:
            measured = measure(call, self.rows)
        except AttemperError as error:
            self._exclude(layer, f"its logits could not be measured: {error}")
            return
        if self._maxima is not None:
            before = self._maxima.get(layer)
            self._maxima[layer] = measured.scaled_max if before is None else torch.maximum(before, measured.scaled_max)
        if not self._due:
            return
        key = (layer, call.call)
        if key not in self._slots:
            self._slots[key] = measured
        elif self._slots[key].stats.heads == measured.stats.heads:
            self._slots[key] = self._slots[key].merge(measured)
        else:
            heads = f"{self._slots[key].stats.heads} and {measured.stats.heads}"
            self._exclude(layer, f"it ran with different numbers of heads within one step, {heads}")

    def _wants(self) -> bool:
        return self._due or self._maxima is not None

    def _exclude(self, layer: str, reason: str) -> None:
        self._seeing.notes.setdefault(layer, reason)
        for key in [key for key in self._slots if key[0] == layer]:
            del self._slots[key]
        if self._maxima is not None:
            self._maxima.pop(layer, None)


def _innermost(model: nn.Module) -> nn.Module:
    """The module inside the wrappers that torch puts around a model."""
    inside = getattr(model, "module" if isinstance(model, nn.parallel.DistributedDataParallel) else "_orig_mod", None)
    return _innermost(inside) if isinstance(inside, nn.Module) else model


def _patterns(model: nn.Module, layers: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if layers is None:
        return None
    patterns = (layers,) if isinstance(layers, str) else tuple(layers)
    names = [name for name, _ in model.named_modules()]
    for pattern in patterns:
        if not isinstance(pattern, str) or not any(fnmatchcase(name, pattern) for name in names):
            attending = [name for name in names if "att" in name.rpartition(".")[2].lower()][:4]
            expected = f"patterns of names of modules, such as {', '.join(map(repr, attending or names[1:4]))}"
            raise ArgumentError("layers", repr(pattern), expected)
    return patterns
