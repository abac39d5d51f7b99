"""What a rule over time is: it remembers something of each layer, looks at the layer's next record, and says what it found.

What it must hold: a state is numbers and lists, so that a checkpoint can hold it, a restarted run does not say everything again,
and a look takes no more operations on tensors than it must; no rule speaks at every step, however long what it found goes on.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import isfinite
from typing import Any

from attemper.monitor.alarms.thresholds import AlarmThresholds
from attemper.monitor.records import Alarm, LayerRecord

State = dict[str, Any]
Place = tuple[str, int]

RECEDED = 0.5  # below this share of its threshold, a measure has receded clearly: what fired may fire again
CLEAN = 10  # records in a row after which what flickers, such as a collapse or a NaN, has ended
AGAIN = 10.0  # grown so many times since it fired, it fires again


class LayerRule(ABC):
    """One rule, with a state for each layer and call.

    Attributes:
        name: under which a checkpoint keeps its states. codes: that it can give. remembers: what a state holds, by name.
        states: by (layer, call).
    """

    name: str
    codes: tuple[str, ...]
    remembers: frozenset[str]

    def __init__(self, limits: AlarmThresholds) -> None:
        self.limits = limits
        self.states: dict[Place, State] = {}

    def look(self, layer: LayerRecord, step: int) -> list[Alarm]:
        """The alarms of one layer at one logged step."""
        place = (layer.layer, layer.call)
        state = self.states.get(place)
        if state is None or not self.fits(layer, state):
            state = self.states[place] = self.start(layer, step)
        return self.judge(layer, step, state)

    def fits(self, layer: LayerRecord, state: State) -> bool:
        """Whether a state is about as many heads as the layer has, where it counts heads: a model may have changed."""
        return True

    def restored(self, saved: Any) -> State:
        """A copy of a state out of a checkpoint. Nothing comes in on which a later look would fail, which would end the run.

        Args:
            saved: what a checkpoint has in its place.

        Raises:
            ValueError, TypeError: it is no state of this rule.
        """
        state = dict(saved)
        if state.keys() != self.remembers or not self.sound(state):
            raise ValueError("no state of this rule")
        return copy.deepcopy(state)

    @abstractmethod
    def sound(self, state: State) -> bool:
        """Whether what a state holds is of the kind that this rule keeps there."""

    @abstractmethod
    def start(self, layer: LayerRecord, step: int) -> State:
        """What is remembered of a layer before its first record is judged."""

    @abstractmethod
    def judge(self, layer: LayerRecord, step: int, state: State) -> list[Alarm]:
        """The alarms of one layer at one logged step; the state is changed in place."""


def are_numbers(given: Any, count: int) -> bool:
    """Whether it is a list of so many numbers that float64 can hold."""
    return isinstance(given, list) and len(given) == count and all(map(_is_number, given))


def _is_number(given: Any) -> bool:
    return isinstance(given, float) or (isinstance(given, int) and -(2**63) <= given < 2**63)


def crosses(value: float, threshold: float, fired: float) -> tuple[bool, float]:
    """Whether a measure, of which larger is worse, fires now; and at which value it fired last, 0 where it may fire.

    Args:
        value: what was measured. threshold: above which it fires. fired: at which value it fired last, 0 where it may fire.
    """
    if value < threshold * RECEDED:
        fired = 0.0
    fires = value > threshold and (fired == 0.0 or (value >= AGAIN * fired and isfinite(fired)))
    return fires, value if fires else fired


def place_of(layer: LayerRecord) -> str:
    """The layer as a message names it."""
    return layer.name or "the model"


def heads_of(worst: int, fires: Sequence[bool]) -> str:
    """The worst head, and how many others it is true of."""
    others = sum(fires) - 1
    return f"head {worst}" + (f" (and {others} more)" if others > 0 else "")


def alarm(
    code: str,
    severity: str,
    step: int,
    layer: LayerRecord,
    *,
    head: int | None,
    figure: str,
    value: float,
    threshold: float,
    words: str,
    advice: str,
) -> Alarm:
    """The record of an alarm; its message is one line: where, what, what it leads to and what to do, where more is said.

    Args:
        words: what was measured and since when, a clause. advice: what it leads to and what to do, sentences.
    """
    message = f"{place_of(layer)}: {words}. {advice} More: attemper rule {code}"
    return Alarm(code, severity, step, layer.layer, layer.call, head, figure, value, threshold, message)  # pyrefly: ignore
