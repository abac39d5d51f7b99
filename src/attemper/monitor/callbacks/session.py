"""What the callbacks share: a watch, and QKClip where it is asked for, from the beginning of a training to its end.

What it must hold:
- a misspelt argument is told when the callback is made, not an hour later when the data are ready;
- a training that begins anew, after an exception or with another model, finds nothing left of the last one;
- loggers of other people get few numbers, all of them finite Python floats.
"""

import inspect
import math
from typing import Any, get_args

from torch import Tensor, nn

from attemper.errors import ArgumentError
from attemper.monitor.clipping import QKClip
from attemper.monitor.records import Alarm, Severity
from attemper.monitor.trackers.summary import headline
from attemper.monitor.watching import Watch, watch


class Session:
    """One watch at a time.

    Args:
        clip: threshold of QKClip, or None: weights are left alone.
        stop_on: the least severity of an alarm that asks to stop, or None.
        watching: the other arguments of `watch`.

    Attributes:
        watch: of the training that runs, or that ran last. clip: the same of its QKClip. alarm: the first that asked to stop.

    Raises:
        ArgumentError: stop_on or clip is unusable. TypeError: `watch` has no argument of that name.
    """

    def __init__(self, clip: float | None, stop_on: Severity | None, watching: dict[str, Any]) -> None:
        inspect.signature(watch).bind(None, **watching)
        if stop_on is not None and stop_on not in get_args(Severity):
            raise ArgumentError("stop_on", repr(stop_on), f"one of {', '.join(map(repr, get_args(Severity)))}, or None")
        if clip is not None and not (math.isfinite(clip) and clip > 0):
            raise ArgumentError("clip", clip, "a number above 0, in units of a logit, or None")
        self.watch: Watch | None = None
        self.clip: QKClip | None = None
        self.alarm: Alarm | None = None
        self._threshold, self._stop_on, self._watching = clip, stop_on, watching
        self._loss: Tensor | None = None
        self._running = False

    def begin(self, model: nn.Module, saved: dict[str, Any] | None = None) -> None:
        """Watch a model, from now on to `end`.

        Args:
            model: as `watch` takes it. saved: what `state` gave, where a training is resumed.
        """
        self.end()
        self.alarm, self._loss, self.clip = None, None, None
        self.watch = watch(model, **self._watching)
        self._running = True
        try:
            if self._threshold is not None:
                self.clip = QKClip(model, self._threshold, watch=self.watch)
            for name, each in self._kept().items():
                if saved is not None and name in saved:
                    each.load_state_dict(saved[name])
        except BaseException:
            self.end()
            raise

    def add_loss(self, loss: object) -> None:
        """One part of the loss of a step; the sum of the parts is written beside its record. It stays where it is until then."""
        if isinstance(loss, Tensor) and loss.numel() == 1:
            loss = loss.detach().reshape(())
            self._loss = loss if self._loss is None else self._loss + loss

    def step(self, number: int) -> dict[str, float]:
        """End a step, right after the optimiser's.

        Returns:
            What loggers get; empty where the step is not logged, or nothing is watched.
        """
        if self.watch is None or not self._running:
            return {}
        loss, self._loss = self._loss, None
        scalars: dict[str, Any] = {} if loss is None else {"loss": loss}
        if self.clip is not None:
            self.clip.step()
            scalars |= self.clip.scalars()
        record = self.watch.step(number, **scalars)  # which reads the loss only where the step is logged
        if record is None:
            return {}
        if self.alarm is None and self._stop_on is not None:
            severities = get_args(Severity)
            enough = severities[: severities.index(self._stop_on) + 1]
            self.alarm = next((alarm for alarm in record.alarms if alarm.severity in enough), None)
        found = headline(record)
        if self.clip is not None:
            found |= {"attention/clipped_heads": float(self.clip.clipped), "attention/min_factor": self.clip.min_factor}
        return found

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: what the alarms remember, and the counts of QKClip."""
        return {name: each.state_dict() for name, each in self._kept().items()}

    def end(self) -> None:
        """Stop watching; `watch` and `clip` stay to be looked at. A second time does nothing."""
        self._running = False
        for each in self._kept().values():
            each.remove()

    def _kept(self) -> dict[str, QKClip | Watch]:
        return {name: each for name, each in (("clip", self.clip), ("watch", self.watch)) if each is not None}


class HasSession:
    """What a callback tells of the session that it holds."""

    _session: Session

    @property
    def watch(self) -> Watch | None:
        """Of the training that runs, or that ran last."""
        return self._session.watch

    @property
    def clip(self) -> QKClip | None:
        """Of the training that runs, or that ran last."""
        return self._session.clip

    @property
    def alarm(self) -> Alarm | None:
        """Which stopped the training."""
        return self._session.alarm
