"""Can clipping the gradient, or the logits, stand in for the scale?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from attemper.lab.comparing import spread, told
from attemper.lab.config import RunConfig
from attemper.lab.presets.arms import TEXT_LIMIT, USUAL, Arm, arm_of, seeded, text_base
from attemper.lab.presets.grouping import figure_series, first, grouped, validation_series
from attemper.lab.presets.preset import Effort, Preset
from attemper.lab.presets.telling import NONE, against_base, compared_table, few_seeds, losses_told, signed, verdict, versus
from attemper.lab.store.results import RunResult
from attemper.report.sweeps import Answer, Chart


def _arm(name: str, rule: str, clip: float | None, qk_clip: float | None = None) -> Arm:
    return Arm(name, {"model.rule": rule, "optimiser.gradient_clip": clip, "optimiser.qk_clip": qk_clip})


BARE, CLIPPED, HARD, SCALED = "none", "none, gradients clipped at 1", "none, gradients clipped at 0.1", USUAL
ARMS = (
    _arm(BARE, "none", None),
    _arm(CLIPPED, "none", 1.0),
    _arm(HARD, "none", 0.1),
    _arm("none, QK-clip at 30", "none", None, 30.0),
    _arm(SCALED, "inverse_sqrt", None),
    _arm(f"{USUAL}, gradients clipped at 1", "inverse_sqrt", 1.0),
)


class Place(NamedTuple):
    """An arm."""

    arm: str


def runs(effort: Effort) -> list[RunConfig]:
    """With and without a scale, with and without clipping, at wide heads."""
    base = text_base(effort, quick_steps=120, full_steps=600, head_dim=256)
    return seeded([arm.over(base) for arm in ARMS], 3 if effort == "quick" else 5)


def place(run: RunResult) -> Place:
    """Where a run stands."""
    return Place(arm_of(ARMS, run.config))


def answer(results: Sequence[RunResult], _rows: Sequence[Any] = ()) -> Answer:
    """What is left of the gap to 1/√d when gradients are clipped."""
    arms = grouped(results, place)
    bare, clipped = (arms.get(Place(name), []) for name in (BARE, CLIPPED))
    tests = against_base(arms, lambda _: Place(SCALED), also={"clipping alone": versus(clipped, bare)})
    gained = tests["clipping alone"]
    gap, left, least = (tests.get(Place(name), NONE) for name in (BARE, CLIPPED, HARD))
    sentence = (
        f"No scale with gradients clipped at 1 {verdict(left, 'is behind', 'is ahead of')} 1/√d without any "
        "clipping: the difference "
        f"in held-out loss is {left}; clipped at 0.1 it is {least}, and without clipping {gap}. Clipping alone "
        "changes the loss of no "
        f"scale by {gained}.{losses_told(arms)}"
    )
    entropy = {key.arm: figure_series(key.arm, found, "normalized_entropy") for key, found in arms.items()}
    start = {key.arm: spread([first(run, "normalized_entropy") for run in found]).mean for key, found in arms.items()}
    listed = "; ".join(f"{name} {told(value, '.2f')}" for name, value in start.items())
    note = f"Entropy over ln n at the first step, mean over the seeds: {listed}."
    return Answer(
        sentence,
        signed(left, "nats"),
        tables=(compared_table("Held-out loss at the end", ("arm",), arms, tests, what="loss, nats a byte", note=note),),
        charts=(
            Chart(
                "Held-out loss", "step", "nats a byte", tuple(validation_series(key.arm, found) for key, found in arms.items())
            ),
            Chart("Entropy over ln n", "step", "entropy / ln n", tuple(entropy.values())),
        ),
        limits=(
            TEXT_LIMIT,
            (
                "AdamW divides by the size of its gradients, so clipping all of them by one factor changes little "
                "there; under SGD it changes more."
            ),
            "One learning rate for all arms.",
            few_seeds(arms),
        ),
    )


PRESET = Preset(
    "clip-vs-scale",
    "Does clipping gradients do what the scale does?",
    ("Vaswani et al. 2017, arXiv 1706.03762, section 3.2.1", "Kimi K2 2025, arXiv 2507.20534, section 2.1 (QK-clip)"),
    runs,
    answer,
)
