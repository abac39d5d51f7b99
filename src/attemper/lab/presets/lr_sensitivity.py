"""How much does the choice of the learning rate matter under each rule? The metric of Wortsman et al. 2023."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from attemper.lab.comparing import Paired, corrected, paired, spread
from attemper.lab.config import RunConfig
from attemper.lab.presets.arms import RULES, TEXT_LIMIT, USUAL, arm_of, seeded, text_base
from attemper.lab.presets.grouping import banded, grouped
from attemper.lab.presets.preset import Effort, Preset
from attemper.lab.presets.telling import NONE, cells_of, losses_told, number, signed, verdict
from attemper.lab.store.results import RunResult
from attemper.report.sweeps import Answer, Chart, HeatMap, Table

RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
QK_NORM = "QK-norm and 1/√d"
QUICK = ("none", USUAL, "1/d", QK_NORM)


class Place(NamedTuple):
    """An arm at a learning rate."""

    arm: str
    rate: float


def runs(effort: Effort) -> list[RunConfig]:
    """Every rule at seven learning rates."""
    base = text_base(effort, quick_steps=60, full_steps=300, head_dim=128)
    arms = [arm for arm in RULES if effort == "full" or arm.name in QUICK]
    made = [
        arm.over(base.model_copy(update={"optimiser": base.optimiser.model_copy(update={"learning_rate": rate})}))
        for arm in arms
        for rate in RATES
    ]
    return seeded(made, 3 if effort == "quick" else 5)


def place(run: RunResult) -> Place:
    """Where a run stands."""
    return Place(arm_of(RULES, run.config), run.config.optimiser.learning_rate)


def capped(run: RunResult) -> float:
    """min(loss, loss before the first step): what diverged or rose counts as having learned nothing."""
    before = run.curves.loss[0].item()
    return min(run.loss, before) if math.isfinite(run.loss) else before


def sensitivity(losses: Mapping[float, float]) -> float:
    """Mean over the learning rates of min(loss, initial loss), minus the lowest of them."""
    return fmean(losses.values()) - min(losses.values())


def by_rate(arms: Mapping[Place, Sequence[RunResult]], arm: str) -> dict[int, dict[float, float]]:
    """Of each seed that has all learning rates of the arm, of which one ended at least: the capped loss at each."""
    rates = [key.rate for key in arms if key.arm == arm]
    found: dict[int, dict[float, float]] = {}
    ended = set()
    for rate in rates:
        for run in arms[Place(arm, rate)]:
            found.setdefault(run.config.seed, {})[rate] = capped(run)
            if run.status == "done":
                ended.add(run.config.seed)
    return {seed: losses for seed, losses in found.items() if len(losses) == len(rates) and seed in ended}


def answer(results: Sequence[RunResult], _rows: Sequence[Any] = ()) -> Answer:
    """The sensitivity of each rule, and whether it differs from that of 1/√d."""
    arms = grouped(results, place)
    names = list(dict.fromkeys(key.arm for key in arms))
    losses = {name: by_rate(arms, name) for name in names}
    scores = {name: {seed: sensitivity(each) for seed, each in found.items()} for name, found in losses.items()}
    tests = corrected({name: _against(scores[name], scores.get(USUAL, {})) for name in names if name != USUAL})
    none, norm = (tests.get(name, NONE) for name in ("none", QK_NORM))
    usual = spread(list(scores.get(USUAL, {}).values()))
    low, high = min(key.rate for key in arms), max(key.rate for key in arms)
    sentence = (
        f"Over learning rates {low:g} to {high:g}, training with 1/√d loses {usual} nats on average against its own best rate. "
        f"No scale {verdict(none, 'is more sensitive than', 'is less sensitive than')} it: the difference is {none}. QK-norm "
        f"{verdict(norm, 'is more sensitive than', 'is less sensitive than')} it: {norm}."
        f"{losses_told(arms, 'counted with the loss before the first step')}"
    )
    return Answer(
        sentence,
        signed(none, "nats"),
        tables=(_table(names, losses, scores, tests, arms), _losses(names, arms)),
        charts=(
            Chart(
                "Final loss over the learning rate",
                "learning rate",
                "min(loss, initial loss), nats a byte",
                tuple(banded(name, _turned(losses[name])) for name in names),
                log_x=True,
                note="Bands are one standard deviation over the seeds.",
            ),
        ),
        maps=(
            HeatMap(
                "Final loss",
                tuple(names),
                tuple(f"{rate:g}" for rate in RATES),
                tuple(
                    tuple(spread([each[rate] for each in losses[name].values() if rate in each]).mean for rate in RATES)
                    for name in names
                ),
                "nats a byte",
                "min(loss, initial loss), mean over the seeds.",
            ),
        ),
        limits=(
            TEXT_LIMIT,
            (
                "The metric averages over the rates that were tried: another grid gives another number. It is low as "
                "well for a rule that is bad at every rate, so the best loss stands beside it."
            ),
            "AdamW with a warm-up and a cosine; the metric's authors train far longer, where slow instabilities show.",
        ),
    )


def _against(one: Mapping[int, float], two: Mapping[int, float]) -> Paired:
    seeds = sorted(one.keys() & two.keys())
    return paired([one[seed] for seed in seeds], [two[seed] for seed in seeds])


def _turned(losses: Mapping[int, Mapping[float, float]]) -> dict[float, list[float]]:
    found: dict[float, list[float]] = {}
    for each in losses.values():
        for rate, loss in each.items():
            found.setdefault(rate, []).append(loss)
    return found


def _table(names: Sequence[str], losses: Any, scores: Any, tests: Mapping[str, Paired], arms: Any) -> Table:
    rows = []
    for name in names:
        means = {rate: spread(values) for rate, values in _turned(losses[name]).items()}
        best = min(means, key=lambda rate: means[rate].mean, default=math.nan)
        diverged = sum(run.status == "diverged" for key, found in arms.items() if key.arm == name for run in found)
        total = sum(len(found) for key, found in arms.items() if key.arm == name)
        test = (*cells_of(tests[name]), number(tests[name].raised)) if name in tests else ("",) * 4
        rows.append(
            (
                name,
                str(spread(list(scores[name].values()))),
                *test,
                number(best, "g"),
                str(means.get(best, "")),
                f"{diverged} of {total}",
            )
        )
    header = ("rule", "sensitivity, nats", "minus 1/√d", "95 % interval", "p", "p, Holm", "best rate", "loss there", "diverged")
    note = (
        "Sensitivity: mean over the rates of min(loss, loss before the first step), minus the lowest (Wortsman "
        "et al. 2023), seed by "
        "seed. What diverged counts as the loss before the first step. p is that of a paired t test over the seeds."
    )
    return Table("Sensitivity to the learning rate", header, tuple(rows), note)


def _losses(names: Sequence[str], arms: Mapping[Place, Sequence[RunResult]]) -> Table:
    rates = sorted({key.rate for key in arms})
    rows = []
    for name in names:
        found = [arms.get(Place(name, rate), []) for rate in rates]
        rows.append((name, *(str(spread([run.loss for run in each])) for each in found)))
    note = "As it is, without those that diverged; “unknown”: all did."
    return Table("Final loss at each learning rate, nats a byte", ("rule", *(f"{rate:g}" for rate in rates)), tuple(rows), note)


PRESET = Preset(
    "lr-sensitivity",
    "How much does it matter under each rule that the learning rate is right?",
    ("Wortsman et al. 2023, arXiv 2309.14322, section 2.2",),
    runs,
    answer,
)
