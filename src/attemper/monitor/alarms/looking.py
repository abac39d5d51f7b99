"""All alarms of one run: each record goes through every rule, and what the rules remember can be kept in a checkpoint."""

import copy
from collections.abc import Mapping
from typing import Any

import torch

from attemper.errors import ArgumentError
from attemper.monitor.alarms.collapse import EntropyCollapse, GainCollapse
from attemper.monitor.alarms.growth import Growth
from attemper.monitor.alarms.large_logits import LargeLogits
from attemper.monitor.alarms.layer_rule import LayerRule
from attemper.monitor.alarms.nonfinite import NonfiniteLogits
from attemper.monitor.alarms.norm_growth import NormGrowth
from attemper.monitor.alarms.thresholds import AlarmThresholds
from attemper.monitor.records import Alarm, StepRecord

_RULES: tuple[type[LayerRule], ...] = (LargeLogits, Growth, EntropyCollapse, GainCollapse, NonfiniteLogits, NormGrowth)
CODES: tuple[str, ...] = tuple(code for rule in _RULES for code in rule.codes)
_GRAVE = ("error", "warning", "info")


class Alarms:
    """The rules over time of one run, one logged step after the other.

    Args:
        thresholds: an `AlarmThresholds`, or numbers by name, such as {"alarming-logit": 50}; what is not named keeps its default.

    Raises:
        ArgumentError: no threshold has the name, or the number is out of its range.
    """

    def __init__(self, thresholds: Mapping[str, float] | AlarmThresholds | None = None) -> None:
        self.thresholds = AlarmThresholds.of(thresholds)
        self._rules = tuple(rule(self.thresholds) for rule in _RULES)

    @torch.no_grad()
    def look(self, record: StepRecord) -> tuple[Alarm, ...]:
        """What fires at this step, errors first. To be called once for each logged step, in their order."""
        found = [alarm for layer in record.layers for rule in self._rules for alarm in rule.look(layer, record.step)]
        return tuple(sorted(found, key=lambda alarm: _GRAVE.index(alarm.severity)))

    def state_dict(self) -> dict[str, Any]:
        """What the rules remember, as strings and numbers in dictionaries and lists: `torch.save` keeps it."""
        return {
            rule.name: [
                {"layer": layer, "call": call, "state": copy.deepcopy(state)} for (layer, call), state in rule.states.items()
            ]
            for rule in self._rules
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remember what `state_dict` gave: what has been told before a restart is not told again.

        Raises:
            ArgumentError: it is not what `state_dict` gives.
        """
        expected = "what Alarms.state_dict gave"
        if not isinstance(state, Mapping) or set(state) != {rule.name for rule in self._rules}:
            given = ", ".join(map(repr, state)) if isinstance(state, Mapping) else type(state).__name__
            raise ArgumentError("state", given, expected)
        found = []
        for rule in self._rules:
            try:
                found.append({(str(each["layer"]), int(each["call"])): rule.restored(each["state"]) for each in state[rule.name]})
            except (LookupError, TypeError, ValueError, OverflowError) as error:
                raise ArgumentError("state", f"a dictionary with a fault under {rule.name!r} ({error!r})", expected) from error
        for rule, states in zip(self._rules, found, strict=True):  # all of them or none
            rule.states = states
