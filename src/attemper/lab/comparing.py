"""Means over seeds, their spread, and tests of pairs: the same seed gives the same examples, and like models the same weights.

A difference is claimed only with its test beside it. Of few seeds little can be claimed: a paired t test of three has two degrees
of freedom, and a rank test cannot fall below 0.25 there, so that t, which takes the differences as normal, is what is left.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import TypeVar

from attemper.errors import MissingExtraError

LEVEL = 0.05
UNKNOWN = "unknown"
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Spread:
    """Numbers over seeds: `mean`, and `sd`, the standard deviation of a single one (NaN of fewer than two); `count` of them."""

    mean: float
    sd: float
    count: int

    def __str__(self) -> str:
        return self.told(".3f")

    def told(self, form: str) -> str:
        """In words: the mean, and the spread behind it where there is one."""
        return told(self.mean, form) + ("" if math.isnan(self.sd) else f" ± {self.sd:{form.lstrip('+')}}")


@dataclass(frozen=True)
class Paired:
    """A difference, first − second, seed by seed.

    Attributes:
        mean: of the differences. low, high: 95 % interval of it by Student's t. p: of the paired t test, two-sided.
        count: pairs. lost: pairs of which one is no number, thus a training that diverged.
        raised: Holm's p, where the test is one of several; p where it is alone. tests: how many these are.
    """

    mean: float
    low: float
    high: float
    p: float
    count: int
    lost: int
    raised: float = math.nan
    tests: int = 1

    @property
    def clear(self) -> bool:
        """Whether the test rejects no difference at 5 %; where it is one of several, at 5 % for all of them together."""
        return (self.p if self.tests == 1 else self.raised) < LEVEL

    def __neg__(self) -> Paired:
        """The same test of second − first."""
        return replace(self, mean=-self.mean, low=-self.high, high=-self.low)

    def __str__(self) -> str:
        if not self.count:
            return f"{UNKNOWN} (0 pairs, no test)"
        if self.count < 2:
            return f"{self.mean:+.3f} ({self.count} pairs, no test)"
        interval = f"95 % interval {self.low:+.3f} to {self.high:+.3f}"
        p = f"p = {self.p:.2g}" if self.tests == 1 else f"Holm's p of {self.tests} tests = {self.raised:.2g}"
        return f"{self.mean:+.3f} ({interval}, paired t, {p}, {self.count} seeds)"


def told(value: float, form: str) -> str:
    """A number as text; of what no run that ended tells, that it is unknown."""
    return UNKNOWN if math.isnan(value) else f"{value:{form}}"


def spread(values: Sequence[float]) -> Spread:
    """Mean and standard deviation of the numbers among the values."""
    known = [value for value in values if math.isfinite(value)]
    return Spread(fmean(known) if known else math.nan, stdev(known) if len(known) > 1 else math.nan, len(known))


def paired(first: Sequence[float], second: Sequence[float]) -> Paired:
    """The difference of two arms, seed by seed; a pair with a value that is no number is left out, and counted."""
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if math.isfinite(a) and math.isfinite(b)]
    differences = [a - b for a, b in pairs]
    lost = len(first) - len(pairs)
    if len(pairs) < 2:
        return Paired(fmean(differences) if differences else math.nan, math.nan, math.nan, math.nan, len(pairs), lost)
    if stdev(differences) == 0:
        same = differences[0]
        return Paired(same, same, same, 1.0 if same == 0 else 0.0, len(pairs), lost)
    try:
        from scipy import stats
    except ImportError:
        raise MissingExtraError("scipy", "lab", "test differences over seeds") from None
    tested = stats.ttest_1samp(differences, 0.0)
    low, high = tested.confidence_interval(1 - LEVEL)
    return Paired(fmean(differences), float(low), float(high), float(tested.pvalue), len(pairs), lost)


def holm(ps: Sequence[float]) -> list[float]:
    """The p values of several tests, raised so that all together err with the level's probability (Holm 1979).

    NaN stays NaN and counts as no test.
    """
    order = sorted((place for place, p in enumerate(ps) if not math.isnan(p)), key=lambda place: ps[place])
    raised, highest = list(ps), 0.0
    for rank, place in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - rank) * ps[place]))
        raised[place] = highest
    return raised


def corrected(tests: Mapping[Key, Paired]) -> dict[Key, Paired]:
    """The tests that one answer makes, each with Holm's p beside its own, and with how many they are.

    Args:
        tests: by any name; those without a p, of too few pairs, count as none.

    Returns:
        The same, by the same names in the same order.
    """
    raised = holm([test.p for test in tests.values()])
    count = max(1, sum(not math.isnan(p) for p in raised))
    return {name: replace(test, raised=p, tests=count) for (name, test), p in zip(tests.items(), raised, strict=True)}
