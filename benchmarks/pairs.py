"""Timing several functions against one another: in one process, in turn, compared round by round.

Two timings taken minutes apart differ by what else the machine was doing; within a round both saw the same, so a ratio is formed
in each round and the median of the ratios is what counts.
"""

import math
import statistics
import timeit
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple


class Pace(NamedTuple):
    """How long to measure.

    round_seconds: least time of one round, all functions together; rounds: how many at most; fewest: how many at least;
    seconds: when to stop before `rounds` are done.
    """

    round_seconds: float = 0.3
    rounds: int = 11
    fewest: int = 5
    seconds: float = 2.0


class Timed(NamedTuple):
    """Seconds a call: one tuple a round, in the order of the functions."""

    rounds: tuple[tuple[float, ...], ...]

    def seconds(self, function: int) -> float:
        """The median time of one call."""
        return statistics.median(times[function] for times in self.rounds)

    def ratio(self, one: int, other: int) -> float:
        """The median over rounds of one function's time over another's."""
        return statistics.median(times[one] / times[other] for times in self.rounds)


def compare(functions: tuple[Callable[[], object], ...], pace: Pace) -> Timed:
    """Time the functions in turn, over and over; each is called as often in a round as fills its share of the round."""
    share = pace.round_seconds / len(functions)
    numbers = [_calls_in(share, function) for function in functions]
    rounds: list[tuple[float, ...]] = []
    began = perf_counter()
    while len(rounds) < pace.fewest or (len(rounds) < pace.rounds and perf_counter() - began < pace.seconds):
        rounds.append(
            tuple(timeit.timeit(function, number=number) / number for function, number in zip(functions, numbers, strict=True))
        )
    return Timed(tuple(rounds))


def _calls_in(seconds: float, function: Callable[[], object]) -> int:
    # The first call warms up. Where it was short, it may have been mostly warming up, so a second one is the measure.
    for _ in range(2):
        once = timeit.timeit(function, number=1)
        if once >= seconds:
            return 1
    few = timeit.timeit(function, number=3) / 3
    return max(1, math.ceil(seconds / few))
