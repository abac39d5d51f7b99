"""`watch`: statistics of a model's attention while it trains.

What it must hold:
- the run is what it would be without it: outputs, gradients, random numbers (mode "observe");
- a row is counted once, however often a forward pass is repeated: recomputation under activation checkpointing is not seen,
  since it happens in the backward pass, and evaluation is not either;
- nothing waits for the device between two calls of `step`; `step` reads everything back at once;
- whatever cannot be seen is named; nothing of ours stops a run but a caller's own `on_alarm`.
"""

import contextlib
import dataclasses
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from attemper.capture import AttentionCall, Unseen
from attemper.capture.using import use
from attemper.errors import ArgumentError, AttemperError, MissingExtraError, UnsupportedError
from attemper.monitor.alarms import Alarms, AlarmThresholds
from attemper.monitor.choosing import chosen, innermost, matching
from attemper.monitor.gathering import LocalLayer, gather, gather_maxima
from attemper.monitor.layout import Plan
from attemper.monitor.measuring import MOST_ROWS, Measured, Taken, measure, take
from attemper.monitor.records import COLUMNS, Alarm, LayerRecord, RunInfo, StepRecord
from attemper.monitor.seeing import Seeing
from attemper.monitor.table import table_of
from attemper.monitor.trackers import Tracker, resolve
from attemper.monitor.trackers.guard import Guarded, begin_all
from attemper.monitor.trackers.rows import rows_of
from attemper.monitor.weight_norms import ProjectionNorms

if TYPE_CHECKING:
    import pandas as pd

Mode = Literal["observe", "use"]
# Of each model its watch, which its hooks keep alive: both go together where nobody holds either.
_watches: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[Watch]]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Settings:
    """The arguments of `watch`, checked."""

    every: int
    layers: tuple[str, ...] | None
    mode: Mode
    rows: int
    trackers: tuple[Guarded, ...]
    on_alarm: Callable[[Alarm], object] | None
    alarms: Alarms
    history: int


def watch(
    model: nn.Module,
    *,
    every: int = 1,
    layers: str | Sequence[str] | None = None,
    mode: Mode = "observe",
    rows: int = 1,
    trackers: "str | Tracker | Callable[[StepRecord], object] | Iterable[object]" = (),
    on_alarm: Callable[[Alarm], object] | None = None,
    alarms: Mapping[str, float] | AlarmThresholds | None = None,
    group: dist.ProcessGroup | None = None,
    tensor_parallel: object = None,
    replicated: Sequence[str] = (),
    history: int = 1000,
) -> "Watch":
    """Measure the attention logits of a model while it trains.

        with attemper.watch(model, trackers="jsonl:runs/a.jsonl") as watching:
            for batch in batches:
                loss = model(batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                watching.step(loss=loss.item())

    Every forward pass of the model in training counts, as many as there are between two calls of `step`; one in evaluation mode
    without gradients does not. See docs/watch.md.

    Args:
        model: any module; of a DistributedDataParallel or a compiled module the one inside is meant.
        every: steps from one record to the next; between them nothing is measured.
        layers: patterns of module names, such as `"*.self_attn"`, or None: every attention module.
        mode: "observe": the model's own kernel computes, and the statistics come from a pass of their own over q and k.
            "use": attemper's kernel computes (see `attemper.use`), and the statistics come with it.
        rows: in mode "observe", the stride of the rows that are measured: 8 looks at every eighth query and costs an eighth.
        trackers: where the records go: trackers of `attemper.monitor`, functions of a record, or names such as
            "parquet:runs/a"; one, or several in a list. On rank 0 alone. See docs/trackers.md.
        on_alarm: called with each alarm, on every process; it may raise to end the run.
        alarms: thresholds by name, such as {"alarming-logit": 50}; what is not named keeps its default. See docs/alarms.md.
        group: the processes whose rows are counted together; None: all, where torch.distributed is initialised.
        tensor_parallel: a process group, or a DeviceMesh of one dimension, over which heads are sharded; None: what the DTensors
            among the parameters say. replicated: patterns of layers that each of its ranks has whole. See docs/distributed.md.
        history: how many logged steps `frame` looks back on.

    Raises:
        ArgumentError: an argument does not fit; the message names it. UnsupportedError: the model is watched already, or, in
            mode "use", is in use. What a tracker raises as it begins.
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
    if on_alarm is not None and not callable(on_alarm):
        raise ArgumentError("on_alarm", repr(on_alarm), "a function of one alarm, or None")
    root = innermost(model)
    if Watch.of(root) is not None:
        raise UnsupportedError("model: it is watched already; remove() what watch() returned for it (Watch.of(model)) first")
    plan = Plan(root, group, tensor_parallel, replicated)
    settings = Settings(every, matching(root, layers), mode, rows, tuple(resolve(trackers)), on_alarm, Alarms(alarms), history)
    return Watch(root, settings, plan)


class Watch:
    """What `watch` returns.

    Args:
        model: without wrappers. settings: the arguments of `watch`. plan: how processes share the model out.

    Attributes:
        last: the last logged step, None before the first. settings: as given.
    """

    def __init__(self, model: nn.Module, settings: Settings, plan: Plan) -> None:
        self.last: StepRecord | None = None
        self._model, self.settings, self._plan = model, settings, plan
        self._rows: deque[dict[str, list[Any]]] = deque(maxlen=settings.history)
        self._next = 0
        self._taken: list[tuple[tuple[str, int], Taken]] = []  # the calls that wait to be reduced
        self._waiting = 0  # how many rows they have, and one more each
        self._slots: dict[tuple[str, int], Measured] = {}
        self._maxima: dict[tuple[str, int], Tensor] | None = None
        self._heads: dict[tuple[str, int], int] = {}
        self._norms: ProjectionNorms | None = None
        self._order = {name: place for place, (name, _) in enumerate(model.named_modules())}
        self._trackers = settings.trackers if _rank(plan) == 0 else ()
        begin_all(self._trackers, _info(model, settings, plan))
        self._stack = contextlib.ExitStack()
        try:
            if settings.mode == "use":
                self._stack.enter_context(use(model))
            self._seeing = Seeing(model, settings.mode == "use", self._measure, self._wants)
            self._stack.callback(self._seeing.remove)
        except BaseException:
            self._close()
            raise
        _watches[model] = weakref.ref(self)

    @staticmethod
    def of(model: nn.Module) -> "Watch | None":
        """The watch of a model, or None."""
        found = _watches.get(innermost(model))
        return None if found is None else found()

    def step(self, step: int | None = None, **scalars: float) -> StepRecord | None:
        """End a step, after `optimizer.step()`. A collective: every process calls it.

        Args:
            step: its number, from 0 to 2^63 − 1; None: one more than the last, from 0.
            scalars: numbers to keep beside the record, such as the loss.

        Returns:
            The record of the step, None where it is not logged.

        Raises:
            ArgumentError: the step is no such number. UnsupportedError: the watch was removed.
        """
        if Watch.of(self._model) is not self:
            raise UnsupportedError("this watch was removed; call watch() again for another")
        if step is not None and (not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**63):
            raise ArgumentError("step", repr(step), "a whole number from 0 to 2^63 − 1, or None")
        number = self._next if step is None else step
        self._reduce()
        logged, slots = self._due, self._slots
        self._next, self._slots = number + 1, {}
        self._seeing.prepare()
        if not logged:
            return None
        numbers = {name: float(each.detach() if isinstance(each, Tensor) else each) for name, each in scalars.items()}
        record = StepRecord(number, time.time(), self._gathered(slots), (), numbers)
        record = dataclasses.replace(record, alarms=self.settings.alarms.look(record))
        if not record.layers and self.last is None:
            self._warn_of_nothing()
        self.last = record
        self._rows.append(rows_of(record))
        for tracker in self._trackers:
            tracker.log(record)
        if self.settings.on_alarm is not None:
            for alarm in record.alarms:
                self.settings.on_alarm(alarm)
        return record

    def maxima(self) -> dict[str, Tensor]:
        """Of each layer, float64 [heads] on the CPU: the largest |scale·q·k| since this was asked last. A collective.

        Of a layer whose heads differ in width, which is computed width by width, the heads stand in that order.

        From the first time on, the maxima of every training step are measured, not only of the logged ones.
        """
        self._reduce()
        found = {} if self._maxima is None else self._maxima
        self._maxima = {}
        self._seeing.prepare()
        return gather_maxima(found, self._plan)

    def table(self) -> str:
        """The last logged step as text: a line a layer, with the worst head of each figure."""
        return "no step has been logged" if self.last is None else table_of(self.last)

    def frame(self) -> "pd.DataFrame":
        """The logged steps, as far back as `history`, as a pandas frame: a row a head, the columns of a Parquet tracker.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise MissingExtraError("pandas", "frame", "make a frame; Watch.last and trackers need none") from error
        return pd.DataFrame({name: [each for rows in self._rows for each in rows[name]] for name in COLUMNS})

    def unseen(self) -> tuple[Unseen, ...]:
        """Attention modules that are not measured, each with the reason. Ask after a forward pass."""
        notes = self._seeing.remarks | self._seeing.notes
        return tuple(Unseen(name, notes[name]) for name in sorted(notes, key=lambda name: self._order.get(name, 0)))

    @property
    def faults(self) -> dict[str, Exception]:
        """Trackers that failed and get nothing more, by name, with what they raised."""
        return {tracker.name: tracker.fault for tracker in self._trackers if tracker.fault is not None}

    def state_dict(self) -> dict[str, Any]:
        """What a run that goes on needs to know: the number of the next step, and what the alarms remember."""
        return {"next": self._next, "alarms": self.settings.alarms.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was made.

        Raises:
            ArgumentError: it is not what `state_dict` gives.
        """
        number = state.get("next") if isinstance(state, Mapping) else None
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 2**63 or "alarms" not in state:
            raise ArgumentError("state", repr(state)[:80], "what Watch.state_dict gave")
        self._reduce()
        self.settings.alarms.load_state_dict(state["alarms"])
        self._next = number
        self._seeing.prepare()

    def remove(self) -> None:
        """Stop watching, and close the trackers. A second time does nothing."""
        if Watch.of(self._model) is self:
            del _watches[self._model]
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.remove()

    @property
    def _due(self) -> bool:
        return self._next % self.settings.every == 0

    def _wants(self) -> bool:
        return self._due or self._maxima is not None

    def _close(self) -> None:
        self._stack.close()
        for tracker in self._trackers:
            tracker.close()

    def _measure(self, call: AttentionCall) -> None:
        layer = call.module
        if not chosen(layer, self.settings.layers):
            return
        if call.query.is_meta:
            self._exclude(layer, "it runs on the meta device, where there are no numbers")
            return
        try:
            taken = take(call, self.settings.rows)
        except AttemperError as error:
            self._exclude(layer, f"its logits could not be measured: {error}")
            return
        # Each call by itself: heads of other widths are computed in calls of their own.
        key = (layer, call.call)
        heads = self._heads.setdefault(key, taken.rows.heads)
        if heads != taken.rows.heads:
            self._exclude(layer, f"it ran with different numbers of heads, {heads} and {taken.rows.heads}")
            return
        self._taken.append((key, taken))
        # Counted here: who goes through all that wait at every call takes time as their square.
        self._waiting += 1 + taken.rows.rows.lse.numel()
        if self._waiting >= MOST_ROWS:
            self._reduce()

    @torch.no_grad()
    def _reduce(self) -> None:
        taken, self._taken, self._waiting = self._taken, [], 0
        for (key, _), measured in zip(taken, measure([each for _, each in taken]), strict=True):
            if self._maxima is not None:
                before = self._maxima.get(key)
                self._maxima[key] = measured.scaled_max if before is None else torch.maximum(before, measured.scaled_max)
            if self._due:
                self._slots[key] = self._slots[key].merge(measured) if key in self._slots else measured

    def _exclude(self, layer: str, reason: str) -> None:
        self._seeing.notes.setdefault(layer, reason)
        warnings.warn(f"{layer or 'the model'} is not measured any more: {reason}", stacklevel=2)
        self._taken = [each for each in self._taken if each[0][0] != layer]
        for measured in (self._slots, self._maxima or {}):
            for key in [key for key in measured if key[0] == layer]:
                del measured[key]

    def _gathered(self, slots: dict[tuple[str, int], Measured]) -> tuple[LayerRecord, ...]:
        keys = sorted(slots, key=lambda key: (self._order.get(key[0], 0), key[1]))
        names = list(dict.fromkeys(layer for layer, _ in keys))
        if self._norms is None and names:
            self._norms = ProjectionNorms(self._model, names)
        norms = {} if self._norms is None else self._norms.measure()
        return gather([LocalLayer(*key, *slots[key], norms.get(key[0])) for key in keys], self._plan)

    def _warn_of_nothing(self) -> None:
        reasons = "; ".join(f"{each.module or 'the model'}: {each.reason}" for each in self.unseen())
        if not reasons:
            reasons = "no forward pass of it ran in training mode, or it has no attention; watch the module that is called"
        warnings.warn(f"no attention was measured in {type(self._model).__name__}: {reasons}", stacklevel=3)


def _rank(plan: Plan) -> int:
    return dist.get_rank(plan.group) if dist.is_available() and dist.is_initialized() else 0


def _info(model: nn.Module, settings: Settings, plan: Plan) -> RunInfo:
    world = dist.get_world_size(plan.group) if dist.is_available() and dist.is_initialized() else 1
    name = type(model).__name__
    return RunInfo(name, settings.mode, settings.every, settings.rows, time.time(), version("attemper"), world)
