"""Runs by what was varied, so that presets speak of arms and seeds and not of configurations."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import TypeVar

from torch import Tensor

from attemper.lab.comparing import spread
from attemper.lab.store.results import RunResult
from attemper.report.sweeps import Series

Key = TypeVar("Key", bound=Hashable)


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


def validation_series(name: str, runs: Sequence[RunResult]) -> Series:
    """Validation loss over the steps: mean over the seeds, the band one standard deviation; runs that diverged end there."""
    at: dict[float, list[float]] = {}
    for run in runs:
        for evaluation in run.evaluations:
            if evaluation.kind == "validation":
                at.setdefault(evaluation.at, []).append(evaluation.loss)
    return banded(name, {step: losses for step, losses in sorted(at.items()) if len(losses) == len(runs)})


def figure_series(name: str, runs: Sequence[RunResult], figure: str, layer: int | None = None) -> Series:
    """A figure of the logits over the logged steps, mean over heads and (without `layer`) layers."""
    at: dict[float, list[float]] = {}
    for run in runs:
        values = run.curves.figures[figure]
        means = (values if layer is None else values[:, layer : layer + 1]).flatten(1).nanmean(1)
        for step, value in zip(run.curves.steps.tolist(), means.tolist(), strict=True):
            at.setdefault(step, []).append(value)
    return banded(name, at)


def banded(name: str, at: dict[float, list[float]]) -> Series:
    """A curve of means with a band of one standard deviation."""
    spreads = {x: spread(values) for x, values in sorted(at.items())}
    low = tuple(each.mean - each.sd for each in spreads.values())
    high = tuple(each.mean + each.sd for each in spreads.values())
    return Series(name, tuple(map(float, spreads)), tuple(each.mean for each in spreads.values()), low, high)


def first(run: RunResult, figure: str, logs: int = 1) -> float:
    """Mean of a figure over the first logged steps, all layers and heads."""
    return run.curves.figures[figure][:logs].nanmean().item()


def smoothed(values: Tensor, window: int) -> list[float]:
    """Means of windows side by side; the last may be shorter."""
    edges = [*range(0, len(values), window), len(values)]
    return [values[start:end].mean().item() for start, end in pairwise(edges)]
