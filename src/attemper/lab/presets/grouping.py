"""Runs by what was varied, so that presets speak of arms and seeds and not of configurations."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

from attemper.lab.comparing import spread
from attemper.lab.store.results import RunResult
from attemper.report.sweeps import Series

Key = TypeVar("Key", bound=Hashable)
Points = Callable[[RunResult], Mapping[float, float] | Mapping[int, float]]  # y by x


def grouped(results: Sequence[RunResult], key: Callable[[RunResult], Key]) -> dict[Key, list[RunResult]]:
    """The runs of each arm, in order of the seed."""
    found: dict[Key, list[RunResult]] = {}
    for result in results:
        found.setdefault(key(result), []).append(result)
    return {name: sorted(runs, key=lambda run: run.config.seed) for name, runs in found.items()}


def by_seed(one: Sequence[RunResult], two: Sequence[RunResult]) -> list[tuple[RunResult, RunResult]]:
    """The pairs of runs of one seed."""
    others = {run.config.seed: run for run in two}
    return [(run, others[run.config.seed]) for run in one if run.config.seed in others]


def series_of(name: str, runs: Sequence[RunResult], points: Points) -> Series:
    """What each run has at the places on the horizontal axis, as a curve of means over the runs that have it there."""
    return banded(name, _at(runs, points))


def validation_series(name: str, runs: Sequence[RunResult]) -> Series:
    """Validation loss over the steps: mean over the seeds, the band one standard deviation; runs that diverged end there."""
    at = _at(runs, lambda run: run.losses("validation"))
    return banded(name, {step: losses for step, losses in at.items() if len(losses) == len(runs)})


def figure_series(name: str, runs: Sequence[RunResult], figure: str) -> Series:
    """A figure of the logits over the logged steps, mean over heads and layers."""

    def points(run: RunResult) -> dict[float, float]:
        means = run.curves.figures[figure].flatten(1).nanmean(1)
        return dict(zip(run.curves.steps.tolist(), means.tolist(), strict=True))

    return series_of(name, runs, points)


def _at(runs: Sequence[RunResult], points: Points) -> dict[float, list[float]]:
    found: dict[float, list[float]] = {}
    for run in runs:
        for x, y in points(run).items():
            found.setdefault(x, []).append(y)
    return found


def banded(name: str, at: dict[float, list[float]]) -> Series:
    """A curve of means with a band of one standard deviation."""
    spreads = {x: spread(values) for x, values in sorted(at.items())}
    low = tuple(each.mean - each.sd for each in spreads.values())
    high = tuple(each.mean + each.sd for each in spreads.values())
    return Series(name, tuple(map(float, spreads)), tuple(each.mean for each in spreads.values()), low, high)


def first(run: RunResult, figure: str) -> float:
    """Mean of a figure at the first logged step, over all layers and heads."""
    return run.curves.figures[figure][:1].nanmean().item()


def last(run: RunResult, figure: str) -> float:
    """The same at the last logged step."""
    return run.curves.figures[figure][-1:].nanmean().item()
