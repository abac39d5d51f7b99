"""`Figure`: a measured number with its uncertainty, and how one is made of several seeds.

The uncertainty is what a second measurement with other seeds may differ by: √2·t standard errors of the mean, since the
difference of two means has √2 of them, and t is Student's for as many seeds at one false alarm in a thousand. Where a figure is
no mean but may differ by a factor, that is stated instead: a ± as large as the figure would let anything below it pass.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# √2·t by the number of seeds: both tails of Student's distribution together hold 1/1000.
_STANDARD_ERRORS = {6: 9.71, 8: 7.65, 12: 6.27, 16: 5.76}


@dataclass(frozen=True)
class Figure:
    """A number of the page.

    Attributes:
        value: the number; margin: how far another measurement may lie from it, in the same unit, 0 where it is exact.
        form: the format in which it is written.
        factor: by which another measurement may be larger or smaller, where that is what is known; margin is then 0.
    """

    value: float
    margin: float
    form: str = ".3g"
    factor: float = 1.0

    def __str__(self) -> str:
        return written(self.value, self.form)

    def with_margin(self) -> str:
        """The number and its uncertainty."""
        if self.factor > 1:
            return f"{self} ×÷ {self.factor:g}"
        return f"{self} ± {_upwards(self.margin, self.form)}" if self.margin else str(self)

    def agrees(self, other: float) -> bool:
        """Whether another measurement lies within the uncertainty."""
        if self.factor > 1:
            return self.value / self.factor <= other <= self.value * self.factor
        return abs(self.value - other) <= self.margin


def _upwards(margin: float, form: str) -> str:
    """A margin with one digit, never a smaller one, written as its figure is."""
    power = 10.0 ** math.floor(math.log10(margin))
    larger = math.ceil(round(margin / power, 6)) * power
    if form.endswith("%"):
        return written(larger, form)
    if form.endswith("e"):
        return written(larger, ".0e")
    return written(larger, ".0f" if larger >= 1 else ".1g")


def written(value: float, form: str) -> str:
    """A number for the page: a true minus sign and none before 0, a power of ten in full."""
    text = format(value, f"z{form}")
    mantissa, mark, exponent = text.partition("e")
    if mark:
        raised = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        text = f"{mantissa}·10{raised}"
    return text.replace("-", "−")


@dataclass(frozen=True)
class Point:
    """One point of a topic's picture; series: the key by which the texts name its line."""

    x: float
    y: float
    series: str


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a topic's measurement gives: its figures, a field each, and the points of its picture."""

    points: tuple[Point, ...]

    def figures(self) -> dict[str, Figure]:
        """The figures by name."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in fields.items() if isinstance(value, Figure)}


def exact(value: float, form: str = ".3g") -> Figure:
    """A number that no seed changes."""
    return Figure(float(value), 0.0, form)


def within_factor(value: float, factor: float, form: str = ".3g") -> Figure:
    """A positive number that another measurement may find larger or smaller by a factor; where it is called says why."""
    return Figure(float(value), 0.0, form, factor)


def estimated(samples: Sequence[float], form: str = ".3g", floor: float = 0.0) -> Figure:
    """The mean over seeds.

    Args:
        samples: one number a seed, for one of the numbers of seeds of which t is known here.
        floor: the least margin, where the seeds agree to the last digit.
    """
    error = statistics.stdev(samples) / math.sqrt(len(samples))
    return Figure(statistics.fmean(samples), max(_STANDARD_ERRORS[len(samples)] * error, floor), form)


def over_seeds(one: Callable[[int], Mapping[str, float]], seed: int, repeats: int) -> dict[str, list[float]]:
    """What `one` gives for each of `repeats` seeds, by name. Torch's own generator is put back afterwards."""
    with torch.random.fork_rng(devices=[]):
        runs = [_seeded(one, 1_000 * seed + number) for number in range(repeats)]
    return {name: [run[name] for run in runs] for name in runs[0]}


def _seeded(one: Callable[[int], Mapping[str, float]], seed: int) -> Mapping[str, float]:
    torch.manual_seed(seed)
    return one(seed)


def estimates(samples: Mapping[str, Sequence[float]], **forms: str) -> dict[str, Any]:
    """Each named figure as `estimated` makes it, in the form given for it."""
    return {name: estimated(samples[name], form) for name, form in forms.items()}


def averaged(samples: Mapping[str, Sequence[float]], series: Mapping[str, str], xs: Sequence[float]) -> tuple[Point, ...]:
    """Points of a picture: the mean over seeds.

    Args:
        series: by each line's key, the name of its samples with {} where x stands. xs: the places along the line.
    """
    return tuple(Point(float(x), statistics.fmean(samples[name.format(x)]), key) for key, name in series.items() for x in xs)
