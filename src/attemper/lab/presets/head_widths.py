"""Heads of unequal width: should each have the scale of its own width, or all one?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from attemper.lab.comparing import spread, told
from attemper.lab.config import RunConfig
from attemper.lab.presets.arms import TEXT_LIMIT, Arm, arm_of, seeded, text_base
from attemper.lab.presets.bounded import MEASURABLE, HeadEntropy, entropies
from attemper.lab.presets.grouping import figure_series, grouped, validation_series
from attemper.lab.presets.preset import Effort, Further, Preset
from attemper.lab.presets.telling import NONE, against_base, compared_table, few_seeds, losses_told, number, signed, verdict
from attemper.lab.store.results import RunResult
from attemper.report.sweeps import Answer, Chart, Table

WIDTHS = (8, 16, 24, 208)  # 256 in all
EQUAL, OWN, SHARED = "equal widths", "unequal, own scales", "unequal, one scale"


def _arm(name: str, widths: int | tuple[int, ...], own: bool) -> Arm:
    return Arm(name, {"model.head_dim": widths, "model.own_scales": own})


ARMS = (_arm(EQUAL, sum(WIDTHS) // len(WIDTHS), True), _arm(OWN, WIDTHS, True), _arm(SHARED, WIDTHS, False))


class Place(NamedTuple):
    """An arm."""

    arm: str


def runs(effort: Effort) -> list[RunConfig]:
    """Four heads, 256 wide in all: equal, or from 8 to 208 with their own scales or with that of the mean width."""
    base = text_base(effort, quick_steps=200, full_steps=1000, heads=len(WIDTHS), position="learned")
    return seeded([arm.over(base) for arm in ARMS], 3 if effort == "quick" else 5)


def place(run: RunResult) -> Place:
    """Where a run stands."""
    return Place(arm_of(ARMS, run.config))


def measure(results: Sequence[RunResult], effort: Effort) -> list[HeadEntropy]:
    """The heads of every model that was trained to the end, as it began and as it ended."""
    examples = 16 if effort == "quick" else 128
    return [row for run in results if run.status == "done" for row in entropies(run, examples)]


def answer(results: Sequence[RunResult], rows: Sequence[HeadEntropy] = ()) -> Answer:
    """Loss of one scale against scales of their own; entropies of the heads beside it."""
    arms = grouped(results, place)
    own, shared = (arms.get(Place(name), []) for name in (OWN, SHARED))
    tests = against_base(arms, lambda _: Place(OWN))
    test, unequal = tests.get(Place(SHARED), NONE), -tests.get(Place(EQUAL), NONE)
    wide = {name: _mean(rows, found, "before", head=len(WIDTHS) - 1) for name, found in (("own", own), ("shared", shared))}
    sentence = (
        f"One scale for heads of widths {', '.join(map(str, WIDTHS))} {verdict(test, 'is behind', 'is ahead of')} "
        "a scale for each: the "
        f"difference in held-out loss is {test}. Before training the widest head has {told(wide['shared'], '.2f')} of the "
        "entropy of uniform "
        f"weights with one scale, and {told(wide['own'], '.2f')} with its own. With scales of their own, a model of unequal "
        f"widths {verdict(unequal, 'is behind', 'is ahead of')} one of equal ones: {unequal}.{losses_told(arms)}"
    )

    return Answer(
        sentence,
        signed(test, "nats"),
        tables=(
            compared_table("Held-out loss at the end", ("heads",), arms, tests, against=OWN, what="loss, nats a byte"),
            _heads(arms, rows),
        ),
        charts=(
            Chart(
                "Held-out loss", "step", "nats a byte", tuple(validation_series(key.arm, found) for key, found in arms.items())
            ),
            Chart(
                "Entropy over ln n, mean of all heads",
                "step",
                "entropy / ln n",
                tuple(figure_series(key.arm, found, "normalized_entropy") for key, found in arms.items()),
            ),
        ),
        limits=(
            TEXT_LIMIT,
            "One set of widths; which is best for what task is not asked.",
            "A head's share of the values is as wide as the head, so that a narrow head also carries less.",
            few_seeds(arms),
        ),
    )


def _mean(rows: Sequence[HeadEntropy], runs: Sequence[RunResult], when: str, head: int) -> float:
    ids = {run.id for run in runs}
    return spread([row.normalized for row in rows if row.run in ids and (row.when, row.head) == (when, head)]).mean


def _heads(arms: Mapping[Place, Sequence[RunResult]], rows: Sequence[HeadEntropy]) -> Table:
    lines = []
    for key, found in arms.items():
        ids = {run.id for run in found}
        for head, width in sorted({(row.head, row.width) for row in rows if row.run in ids}):
            entropies = (number(_mean(rows, found, when, head), ".3f") for when in ("before", "after"))
            lines.append((key.arm, str(head), str(width), *entropies))
    note = "Entropy over ln n of the last position, which sees all; mean over examples, layers and seeds."
    return Table("Entropy of the heads", ("heads", "head", "width", "before training", "after"), tuple(lines), note)


PRESET = Preset(
    "head-widths",
    "Do heads of unequal width need scales of their own?",
    ("Vaswani et al. 2017, arXiv 1706.03762, section 3.2.1",),
    runs,
    answer,
    Further(HeadEntropy, measure),
    given=("model.rule", *MEASURABLE),
)
