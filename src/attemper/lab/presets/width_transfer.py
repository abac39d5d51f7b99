"""Does the best learning rate stay where it is as a model grows wider? 1/√d against 1/d, everything else as muP says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from attemper.lab.comparing import Paired, corrected, paired, spread, told
from attemper.lab.config import RunConfig
from attemper.lab.presets.arms import TEXT_LIMIT, USUAL, Arm, arm_of, seeded, text_base
from attemper.lab.presets.grouping import banded, grouped
from attemper.lab.presets.preset import Effort, Preset
from attemper.lab.presets.telling import few_seeds, losses_told, signed, verdict
from attemper.lab.store.results import RunResult
from attemper.report.sweeps import Answer, Chart, HeatMap, Table

MUP = "1/d"
ARMS = (Arm(USUAL, {"model.rule": "inverse_sqrt"}), Arm(MUP, {"model.rule": "mup"}))
HEADS = 2
BASE = 64  # the width at which both rules are the same
RATES = tuple(2.0**power for power in range(-11, -3))


class Place(NamedTuple):
    """A rule, a width, a learning rate."""

    arm: str
    width: int
    rate: float


def runs(effort: Effort) -> list[RunConfig]:
    """Widths from 32 on, heads that widen with them, and learning rates two apart."""
    widths, rates = ((32, 64, 128), RATES[1::2]) if effort == "quick" else ((32, 64, 128, 256), RATES)
    base = text_base(effort, quick_steps=60, full_steps=300, heads=HEADS, init="mup", mup_base=BASE // HEADS)
    made = []
    for arm in ARMS:
        for width in widths:
            sized = base.model_copy(update={"model": base.model.model_copy(update={"width": width, "head_dim": width // HEADS})})
            for rate in rates:
                dials = base.optimiser.model_copy(update={"learning_rate": rate})
                made.append(arm.over(sized.model_copy(update={"optimiser": dials})))
    return list(dict.fromkeys(seeded(made, 3)))


def place(run: RunResult) -> Place:
    """Where a run stands."""
    return Place(arm_of(ARMS, run.config), run.config.model.width, run.config.optimiser.learning_rate)


def best_rates(arms: Mapping[Place, Sequence[RunResult]], arm: str, width: int) -> dict[int, float]:
    """log₂ of the best learning rate of each seed: where a parabola through the best on the grid and its neighbours is lowest.

    Trainings that diverged are no candidates; at an end of the grid the best is that end.
    """
    losses: dict[int, dict[float, float]] = {}
    for key, found in arms.items():
        if (key.arm, key.width) == (arm, width):
            for run in found:
                if math.isfinite(run.loss):
                    losses.setdefault(run.config.seed, {})[math.log2(key.rate)] = run.loss
    return {seed: lowest(each) for seed, each in losses.items()}


def lowest(losses: Mapping[float, float]) -> float:
    """Where a curve that is known at some points is lowest; they need not be evenly apart, as a rate may have diverged."""
    points = sorted(losses)
    place = min(range(len(points)), key=lambda at: losses[points[at]])
    if place in (0, len(points) - 1):
        return points[place]
    left, middle, right = (points[place + step] for step in (-1, 0, 1))
    down, up = losses[left] - losses[middle], losses[right] - losses[middle]  # neither is negative
    slopes = down / (middle - left), up / (right - middle)
    if sum(slopes) == 0:
        return middle
    return middle + 0.5 * (slopes[0] * (right - middle) - slopes[1] * (middle - left)) / sum(slopes)


def drift(arms: Mapping[Place, Sequence[RunResult]], arm: str) -> dict[int, float]:
    """By how many powers of two the best rate moves from the narrowest model to the widest, seed by seed."""
    widths = sorted({key.width for key in arms})
    first, last = best_rates(arms, arm, widths[0]), best_rates(arms, arm, widths[-1])
    return {seed: last[seed] - first[seed] for seed in first if seed in last}


def answer(results: Sequence[RunResult], _rows: Sequence[Any] = ()) -> Answer:
    """The drift of the best learning rate under each rule."""
    arms = grouped(results, place)
    widths = sorted({key.width for key in arms})
    usual, mup = drift(arms, USUAL), drift(arms, MUP)
    seeds = sorted(usual.keys() & mup.keys())
    test = paired([abs(mup[seed]) for seed in seeds], [abs(usual[seed]) for seed in seeds])
    against: dict[str, Paired] = corrected(
        {name: paired(list(each.values()), [0.0] * len(each)) for name, each in ((USUAL, usual), (MUP, mup))} | {"sizes": test}
    )
    test = against["sizes"]
    sentence = (
        f"From width {widths[0]} to {widths[-1]} the best learning rate moves by {against[USUAL]} powers of two "
        "under 1/√d and by "
        f"{against[MUP]} under 1/d. The size of the move under 1/d "
        f"{verdict(test, 'is larger than', 'is smaller than')} under 1/√d: "
        f"the difference is {test}.{losses_told(arms)}"
    )
    rates = sorted({key.rate for key in arms})
    return Answer(
        sentence,
        signed(test, "powers of two", 2),
        tables=(_table(arms, widths), _losses(arms, widths, rates)),
        charts=tuple(
            Chart(
                f"Final loss over the learning rate, {name}",
                "learning rate",
                "nats a byte",
                tuple(banded(f"width {width}", _losses_at(arms, name, width)) for width in widths),
                log_x=True,
            )
            for name in (USUAL, MUP)
        ),
        maps=tuple(
            HeatMap(
                f"Final loss, {name}",
                tuple(str(width) for width in widths),
                tuple(f"{rate:.2g}" for rate in rates),
                tuple(tuple(_mean(arms.get(Place(name, width, rate), [])) for rate in rates) for width in widths),
                "nats a byte",
                "Rows are widths. Mean over the seeds, without what diverged.",
            )
            for name in (USUAL, MUP)
        ),
        limits=(
            TEXT_LIMIT,
            (
                f"Widths from {widths[0]} to {widths[-1]} and rates {rates[1] / rates[0]:g} times apart: a move of "
                "less than that is read off a parabola. At the ends of the grid it is bounded by them."
            ),
            (
                f"Both rules start alike at width {BASE}, and training is short; 1/d is argued for q and k that have "
                "aligned, which takes time."
            ),
            few_seeds(arms),
        ),
    )


def _losses_at(arms: Mapping[Place, Sequence[RunResult]], arm: str, width: int) -> dict[float, list[float]]:
    return {key.rate: [run.loss for run in found] for key, found in arms.items() if (key.arm, key.width) == (arm, width)}


def _mean(found: Sequence[RunResult]) -> float:
    return spread([run.loss for run in found]).mean


def _table(arms: Mapping[Place, Sequence[RunResult]], widths: Sequence[int]) -> Table:
    rows = []
    for name in (USUAL, MUP):
        for width in widths:
            best = spread(list(best_rates(arms, name, width).values()))
            losses = {rate: _mean(found) for (arm, at, rate), found in arms.items() if (arm, at) == (name, width)}
            known = [loss for loss in losses.values() if math.isfinite(loss)]
            rows.append((name, str(width), str(width // HEADS), f"2^({best})", told(min(known, default=math.nan), ".3f")))
    note = "The best rate is found seed by seed: the lowest point of a parabola through the best of the grid and its neighbours."
    return Table("The best learning rate", ("rule", "width", "d_k", "best rate", "mean loss at the best"), tuple(rows), note)


def _losses(arms: Mapping[Place, Sequence[RunResult]], widths: Sequence[int], rates: Sequence[float]) -> Table:
    rows = [
        (name, str(width), *(str(spread([run.loss for run in arms.get(Place(name, width, rate), [])])) for rate in rates))
        for name in (USUAL, MUP)
        for width in widths
    ]
    return Table("Held-out loss, nats a byte", ("rule", "width", *(f"{rate:.2g}" for rate in rates)), tuple(rows))


PRESET = Preset(
    "width-transfer",
    "Does 1/d keep the best learning rate in its place as models widen, where 1/√d does not?",
    ("Yang et al. 2022, arXiv 2203.03466 (muP), section 4 and table 3",),
    runs,
    answer,
    given=("model.init", "model.mup_base", "optimiser.name"),
)
