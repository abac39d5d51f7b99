"""Heads of unequal width: should each have the scale of its own width, or all one?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from attemper.lab.comparing import spread
from attemper.lab.config import RunConfig
from attemper.lab.presets.arms import TEXT_LIMIT, Arm, arm_of, seeded, text_base
from attemper.lab.presets.grouping import figure_series, grouped, validation_series
from attemper.lab.presets.preset import Effort, Preset
from attemper.lab.presets.telling import compared_table, few_seeds, losses_told, signed, verdict, versus
from attemper.lab.store.results import RunResult
from attemper.report.sweeps import Answer, Chart, Table

WIDTHS = (8, 8, 16, 224)  # 256 in all
EQUAL, OWN, SHARED = "equal widths", "unequal, own scales", "unequal, one scale"


def _arm(name: str, widths: int | tuple[int, ...], own: bool) -> Arm:
    return Arm(name, {"model.head_dim": widths, "model.own_scales": own})


ARMS = (_arm(EQUAL, sum(WIDTHS) // len(WIDTHS), True), _arm(OWN, WIDTHS, True), _arm(SHARED, WIDTHS, False))


class Place(NamedTuple):
    """An arm."""

    arm: str


def runs(effort: Effort) -> list[RunConfig]:
    """Four heads, 256 wide in all: equal, or from 8 to 224 with their own scales or with that of the mean width."""
    base = text_base(effort, quick_steps=200, full_steps=1000, heads=len(WIDTHS))
    return seeded([arm.over(base) for arm in ARMS], 3 if effort == "quick" else 5)


def place(run: RunResult) -> Place:
    """Where a run stands."""
    return Place(arm_of(ARMS, run.config))


def answer(results: Sequence[RunResult], _rows: Sequence[Any] = ()) -> Answer:
    """Loss of one scale against scales of their own; entropies of the heads beside it."""
    arms = grouped(results, place)
    equal, own, shared = (arms.get(Place(name), []) for name in (EQUAL, OWN, SHARED))
    test, unequal = versus(shared, own), versus(own, equal)
    wide = {name: head_entropy(found, -1, 0) for name, found in (("own", own), ("shared", shared))}
    sentence = (
        f"One scale for heads of widths {', '.join(map(str, WIDTHS))} {verdict(test, 'is behind', 'is ahead of')} a scale for each: the "
        f"difference in held-out loss is {test}. At the first step the widest head has {wide['shared']:.2f} of the entropy of uniform "
        f"weights with one scale, and {wide['own']:.2f} with its own. Unequal widths with their own scales "
        f"{verdict(unequal, 'are behind', 'are ahead of')} equal ones: {unequal}.{losses_told(arms)}"
    )

    return Answer(
        sentence,
        signed(test, "nats"),
        tables=(
            compared_table("Held-out loss at the end", ("heads",), arms, lambda _: Place(OWN), against=OWN, what="loss, nats a byte"),
            _heads(arms),
        ),
        charts=(
            Chart("Held-out loss", "step", "nats a byte", tuple(validation_series(key.arm, found) for key, found in arms.items())),
            Chart("Entropy over ln n, mean of all heads", "step", "entropy / ln n", tuple(figure_series(key.arm, found, "normalized_entropy") for key, found in arms.items())),
        ),
        limits=(
            TEXT_LIMIT,
            "One set of widths; which is best for what task is not asked.",
            "A head's share of the values is as wide as the head, so that a narrow head also carries less.",
            few_seeds(arms),
        ),
    )  # fmt: skip


def head_entropy(runs: Sequence[RunResult], head: int, log: int) -> float:
    """Entropy over ln n of one head at one logged step, mean over layers and seeds; NaN without runs."""
    return spread([run.curves.figures["normalized_entropy"][log, :, head].nanmean().item() for run in runs]).mean


def _heads(arms: Mapping[Place, Sequence[RunResult]]) -> Table:
    rows = []
    for key, found in arms.items():
        if not found:
            continue
        widths = found[0].config.model.head_dim
        each = (widths,) * found[0].config.model.heads if isinstance(widths, int) else widths
        for head, width in enumerate(each):
            rows.append((key.arm, str(head), str(width), f"{head_entropy(found, head, 0):.3f}", f"{head_entropy(found, head, -1):.3f}"))
    note = "Entropy over ln n, mean over layers and seeds, before the first step and at the last logged one."
    return Table("Entropy of the heads", ("heads", "head", "width", "at the start", "at the end"), tuple(rows), note)


PRESET = Preset(
    "head-widths",
    "Do heads of unequal width need scales of their own?",
    ("Vaswani et al. 2017, arXiv 1706.03762, section 3.2.1",),
    runs,
    answer,
)
