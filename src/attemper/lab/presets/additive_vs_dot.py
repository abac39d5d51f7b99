"""Additive attention against the dot product: quality on reversal, and time and memory against n and d."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from attemper.lab.comparing import spread, told
from attemper.lab.config import Model, Optimiser, RunConfig, Task
from attemper.lab.presets.arms import USUAL, Arm, arm_of, head_width, seeded
from attemper.lab.presets.costs import Cost, costs
from attemper.lab.presets.grouping import grouped, validation_series
from attemper.lab.presets.preset import Effort, Further, Preset
from attemper.lab.presets.telling import (
    NONE,
    against_base,
    compared_table,
    few_seeds,
    losses_told,
    number,
    signed,
    verdict,
    versus,
)
from attemper.lab.store.results import RunResult
from attemper.report.sweeps import Answer, Chart, Series, Table

ADDITIVE, SCALED, BARE = "additive", f"dot, {USUAL}", "dot, none"
ARMS = (
    Arm(ADDITIVE, {"model.attention": "additive", "model.rule": "inverse_sqrt"}),
    Arm(SCALED, {"model.attention": "dot", "model.rule": "inverse_sqrt"}),
    Arm(BARE, {"model.attention": "dot", "model.rule": "none"}),
)


class Place(NamedTuple):
    """A width and an arm."""

    width: int
    arm: str


def runs(effort: Effort) -> list[RunConfig]:
    """A sequence backwards, by one head, narrow and wide."""
    quick = effort == "quick"
    widths, steps, length = ((16, 256), 200, 8) if quick else ((16, 64, 256, 512), 2000, 16)
    made = []
    for width in widths:
        base = RunConfig(
            task=Task(name="reversal", length=length),
            model=Model(layers=1, heads=1, head_dim=width, width=64),
            optimiser=Optimiser(learning_rate=3e-3),
            steps=steps,
            batch=32,
            evaluate_every=steps // 10,
        )
        made += [arm.over(base) for arm in ARMS]
    return seeded(made, 3 if quick else 5)


def place(run: RunResult) -> Place:
    """Where a run stands."""
    return Place(head_width(run.config), arm_of(ARMS, run.config))


def measure(_results: Sequence[RunResult], effort: Effort) -> list[Cost]:
    """Time and memory of one layer, forwards and backwards."""
    return costs((128, 256, 512), (32, 128), 5) if effort == "quick" else costs((128, 256, 512, 1024), (32, 64, 128, 256), 9)


def answer(results: Sequence[RunResult], rows: Sequence[Cost] = ()) -> Answer:
    """Additive against the dot product with and without a scale, at the widest; then what each costs."""
    arms = grouped(results, place)
    widest = max(key.width for key in arms)
    additive, bare = (arms.get(Place(widest, name), []) for name in (ADDITIVE, BARE))
    tests = against_base(arms, lambda key: key._replace(arm=SCALED), also={"without a scale": versus(additive, bare)})
    unscaled, usual = tests["without a scale"], tests.get(Place(widest, ADDITIVE), NONE)
    sentence = (
        f"At width {widest}, additive attention {verdict(unscaled, 'is behind', 'is ahead of')} the dot product "
        "without a scale: the "
        f"difference in held-out loss is {unscaled} nats a symbol. It "
        f"{verdict(usual, 'is behind', 'is ahead of')} the dot product with "
        f"1/√d: {usual}.{_cost(rows)}{losses_told(arms)}"
    )
    here = {key.arm: found for key, found in arms.items() if key.width == widest}
    return Answer(
        sentence,
        signed(unscaled, "nats"),
        tables=(
            compared_table(
                "Held-out loss at the end",
                ("d", "attention"),
                arms,
                tests,
                against=SCALED,
                what="loss, nats a symbol",
                note=f"Right symbols: {_accuracies(arms)}.",
            ),
            _costs_table(rows),
        ),
        charts=(
            Chart(
                f"Held-out loss, d = {widest}", "step", "nats a symbol", tuple(validation_series(n, f) for n, f in here.items())
            ),
            _chart("Time over n", "ms, forwards and backwards", rows, lambda row: row.milliseconds),
            _chart("Memory over n", "MiB beyond what was held", rows, lambda row: row.mib),
        ),
        limits=(
            (
                "The arms differ between decoder and encoder alone; attention within a sequence is a dot product with 1/√d in "
                "every arm."
            ),
            "Of one seed, a model with additive attention has the examples of one with the dot product, but other first weights.",
            "Reversal is a matter of places: which attention is better for language is not shown.",
            "Times are of one layer in float32 on this machine's CPU with one thread, and memory is the process's.",
            few_seeds(arms),
        ),
    )


def _accuracies(arms: Mapping[Place, Sequence[RunResult]]) -> str:
    return "; ".join(
        f"{key.arm} at {key.width} {told(spread([run.accuracy for run in found]).mean, '.0%')}" for key, found in arms.items()
    )


def _cost(rows: Sequence[Cost]) -> str:
    """What both cost at the largest size where both were measured; the plain additive layer is left out where it is too large."""
    dot, additive = (
        {(row.n, row.d): row for row in rows if row.attention == kind and math.isfinite(row.milliseconds)}
        for kind in ("dot, written out", "additive, written out")
    )
    size = max(dot.keys() & additive.keys(), default=None)
    if size is None:
        return " What it costs was not measured beside the dot product." if rows else ""
    ratio = additive[size].milliseconds / dot[size].milliseconds
    return (
        f" Written out, at n = {size[0]} and d = {size[1]} it takes {ratio:.0f} times the time of the dot product, and "
        f"{told(additive[size].mib, '.0f')} MiB against {told(dot[size].mib, '.0f')}."
    )


def _costs_table(rows: Sequence[Cost]) -> Table:
    lines = tuple(
        (row.attention, str(row.n), str(row.d), number(row.milliseconds, ".2f") or "left out", number(row.mib, ".1f"))
        for row in rows
    )
    note = (
        "One layer, forwards and backwards, with its projections of q and k; the median of rounds in which the kinds take turns. "
        "MiB: how far the process's resident size rose once freed memory was given back. "
        "Left out: what would hold more than 2 GiB."
    )
    return Table("What it costs", ("attention", "n", "d", "ms", "MiB"), lines, note)


def _chart(title: str, unit: str, rows: Sequence[Cost], of: Any) -> Chart:
    widest = max((row.d for row in rows), default=0)
    series = []
    for kind in dict.fromkeys(row.attention for row in rows):
        points = sorted((row.n, of(row)) for row in rows if (row.attention, row.d) == (kind, widest) and of(row) > 0)
        series.append(Series(kind, tuple(float(n) for n, _ in points), tuple(value for _, value in points)))
    return Chart(f"{title}, d = {widest}", "n", unit, tuple(series), log_x=True, log_y=True)


PRESET = Preset(
    "additive-vs-dot",
    "Is additive attention better than the dot product, and what does each cost?",
    ("Bahdanau, Cho, Bengio 2014, arXiv 1409.0473", "Vaswani et al. 2017, arXiv 1706.03762, section 3.2.1"),
    runs,
    answer,
    Further(Cost, measure),
    free=("model.head_dim",),
)
