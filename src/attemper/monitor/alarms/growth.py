"""ATT504: the largest |scale·q·k| of a head grows so fast that it passes 1e3, or 1e4, within a stated number of steps.

What it must hold: noise does not fire it, nor does growth that slows down, as the sound growth after an initialisation does.
log2 of the maximum is regressed on the step, over the last 24 records and over the last 192 (in means of 8). There is growth if

- the slope lies `growth-certainty` standard errors above zero (widened where neighbouring points lie on one side of the line),
- the fitted line rises by an octave or more: the maximum has doubled within the window, it is not only about to,
- the slope over the later half of the window is at least three quarters of that over the earlier half,
- the line ends half an octave above every record from before the window (12 or more): what wanders returns to where it was.

It is told if the head stands at `growth-floor` or above and the line reaches the next size within `growth-horizon` steps.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attemper.monitor.alarms.layer_rule import AGAIN, RECEDED, LayerRule, State, alarm, are_numbers, heads_of
from attemper.monitor.records import Alarm, LayerRecord

POINTS = 24  # of a regression
COARSE = 8  # records in one point of the long window
_BEFORE = 12  # records before the short window
_EVERY = 4  # records from one look at the short window to the next
_RISE = 1.0  # octaves within the window
_ABOVE = 0.5  # octaves above all that was before
_MEMORY = 0.9  # at most, of one point in the next
_KEEPS = 0.75  # of the earlier half's slope


class Trend(NamedTuple):
    """Straight lines through log2 maxima over steps, [heads] each.

    Attributes:
        slope: octaves a step. certainty: slope / standard error, widened by the correlation of neighbours.
        rise: octaves from the first to the last point.
        now: of the line at the last point. keeps: slope over the later half / slope over the earlier half.
    """

    slope: Tensor
    certainty: Tensor
    rise: Tensor
    now: Tensor
    keeps: Tensor


def trend(steps: Tensor, levels: Tensor) -> Trend:
    """Least squares of each head's levels on the steps.

    Args:
        steps: float64 [points], rising. levels: float64 [points, heads].
    """
    slope, mean = _line(steps, levels)
    centred = steps - steps.mean()
    rest = levels - mean - centred.unsqueeze(-1) * slope
    error = (rest.square().sum(0) / (len(steps) - 2) / centred.square().sum()).sqrt()
    # Maxima wander: what is above the line stays there for a while, so the points say less than their number.
    memory = ((rest[1:] * rest[:-1]).sum(0) / rest.square().sum(0).clamp(min=1e-300)).clamp(0.0, _MEMORY)
    error = error * ((1.0 + memory) / (1.0 - memory)).sqrt()
    half = len(steps) // 2
    early, late = (_line(steps[part], levels[part])[0] for part in (slice(half), slice(half, None)))
    keeps = torch.where(early > 0, late / early, torch.inf * late.sign())
    # The rounding of levels around 10 makes the least error that there can be; a straight line has none.
    certainty = slope / error.clamp(min=1e-12)
    return Trend(slope, certainty, slope * (steps[-1] - steps[0]), mean + slope * centred[-1], keeps)


class Growth(LayerRule):
    """Growth of a head's largest |scale·q·k|.

    State: `steps` and `levels`, of each the heads', of the last records; `highest`, of the heads, level of those before them;
    `seen`, how many there were; `fired`, the layer's maximum as it fired, for all its heads: it may fire again where that has
    halved since, or is tenfold.
    """

    name = "growth"
    codes = ("ATT504",)
    remembers = frozenset({"steps", "levels", "highest", "seen", "fired"})

    def sound(self, state: State) -> bool:
        """Whether each record has a step and a level of each head, and there are no more than it keeps."""
        levels, heads = state["levels"], len(state["highest"])
        if not isinstance(levels, list) or len(levels) > POINTS * COARSE:
            return False
        lists = ((state["steps"], len(levels)), (state["highest"], heads), *((each, heads) for each in levels))
        return are_numbers([state["seen"], state["fired"]], 2) and all(are_numbers(*each) for each in lists)

    def start(self, layer: LayerRecord, step: int) -> State:
        """No records."""
        return {"steps": [], "levels": [], "highest": [-torch.inf] * layer.stats.heads, "seen": 0, "fired": 0.0}

    def fits(self, layer: LayerRecord, state: State) -> bool:
        """Whether the levels are of as many heads."""
        return len(state["highest"]) == layer.stats.heads

    def judge(self, layer: LayerRecord, step: int, state: State) -> list[Alarm]:
        """At most one alarm, of the head that is there first."""
        largest = float(layer.scaled_max.max()) if layer.stats.heads else -torch.inf
        if not math.isfinite(largest):  # no rows, or an overflow: in what is remembered it would hide growth for ever
            return []
        self._remember(layer, step, state)
        seen, records = state["seen"], len(state["steps"])
        if largest < state["fired"] * RECEDED:
            state["fired"] = 0.0
        if largest < self.limits.growth_floor:
            return []
        if seen % _EVERY == 0 and records >= POINTS + _BEFORE:
            steps, levels, highest = _tensors(state)
            before = torch.cat([highest.unsqueeze(0), levels[:-POINTS]]).amax(0)
            if found := self._found(layer, step, state, steps[-POINTS:], levels[-POINTS:], before):
                return found
        if seen % COARSE == 0 and records == POINTS * COARSE:
            steps, levels, highest = _tensors(state)
            means = levels.view(POINTS, COARSE, -1).mean(1)
            return self._found(layer, step, state, steps.view(POINTS, COARSE).mean(1), means, highest)
        return []

    def _remember(self, layer: LayerRecord, step: int, state: State) -> None:
        steps, levels = state["steps"], state["levels"]
        while steps and steps[-1] >= step:  # a run that went back to a checkpoint does some steps again
            del steps[-1], levels[-1]
        if len(steps) == POINTS * COARSE:
            state["highest"] = _numbers([state["highest"], levels[0]]).amax(0).tolist()
            del steps[0], levels[0]
        steps.append(step)
        levels.append(layer.scaled_max.double().clamp(min=0.0).log2().tolist())  # of a head without rows as of noughts
        state["seen"] += 1

    def _found(self, layer: LayerRecord, step: int, state: State, steps: Tensor, levels: Tensor, before: Tensor) -> list[Alarm]:
        line = trend(steps, levels)
        value, sizes = layer.scaled_max, _numbers([self.limits.hurting_logit, self.limits.diverging_logit])
        size = torch.where(value < sizes[0], sizes[0], sizes[1])
        left = (size.log2() - line.now) / line.slope - (step - steps[-1])
        grows = (line.certainty >= self.limits.growth_certainty) & (line.rise >= _RISE) & (line.keeps >= _KEEPS)
        grows &= line.now > before + _ABOVE
        told = grows & (value >= self.limits.growth_floor) & (value < size) & (left <= self.limits.growth_horizon)
        fired = state["fired"]
        if not bool(told.any()) or (fired and float(value[told].max()) < AGAIN * fired):
            return []
        state["fired"] = float(value.max())
        return [self._alarm(layer, step, told, line, left, size, int(steps[0]))]

    def _alarm(self, layer: LayerRecord, step: int, fires: Tensor, line: Trend, left: Tensor, size: Tensor, since: int) -> Alarm:
        first, heads = int(torch.where(fires, left, torch.inf).argmin()), fires.tolist()
        value, limit = float(layer.scaled_max[first]), float(size[first])
        there = step + max(1, round(float(left[first])))
        doubling = 1.0 / float(line.slope[first])
        words = (
            f"{heads_of(first, heads)} has a largest |scale·q·k| of {value:.4g}, which doubles every {doubling:.3g} steps "
            f"since step {since} or before: as it goes, it passes {limit:g} near step {there}"
        )
        return alarm(
            "ATT504",
            "warning",
            step,
            layer,
            head=first,
            figure="max_scaled_product",
            value=value,
            threshold=limit,
            words=words,
            advice="Logits of 1e3 hurt training, and of 1e4 end it: hold them with attemper.QKClip, lower the learning rate, or "
            "use QK-norm.",
        )


def _tensors(state: State) -> tuple[Tensor, Tensor, Tensor]:
    """Steps, [records], levels, [records, heads], and the highest before them, [heads], in float64."""
    steps, levels, highest = (_numbers(state[name]) for name in ("steps", "levels", "highest"))
    return steps, levels, highest


def _numbers(values: list[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")  # where records are, whatever the default device


def _line(steps: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Slope and mean of each head's line."""
    centred, mean = steps - steps.mean(), levels.mean(0)
    return (centred.unsqueeze(-1) * (levels - mean)).sum(0) / centred.square().sum(), mean
