"""The two models that come with the package, trained again: what does the factor do that one of them lacks?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from attemper.examples.text import PINNED_SHA256, PINNED_TEXT
from attemper.lab.comparing import spread
from attemper.lab.config import RunConfig
from attemper.lab.presets.arms import TEXT_LIMIT, arm_of
from attemper.lab.presets.grouping import figure_series, grouped, last, validation_series
from attemper.lab.presets.preset import Effort, Further, Preset, Product
from attemper.lab.presets.rebuilding import ARMS, PROVENANCE, SCALED, SHIPPED, UNSCALED, Likeness, check, likenesses, make
from attemper.lab.presets.telling import against_base, compared_table, few_seeds, losses_told, number, signed, verdict, versus
from attemper.lab.store.results import RunResult
from attemper.report.sweeps import Answer, Chart, Table

SEEDS = 3  # from that of the package's own on
FIGURES = ("max_scaled_product", "saturated_share", "normalized_entropy", "gain")


class Place(NamedTuple):
    """A model, by its name in the package."""

    model: str


def runs(effort: Effort) -> list[RunConfig]:
    """Both models as they are in the package, and with two more seeds; the small form stops early."""
    base = SHIPPED
    if effort == "quick":
        short = {"steps": 120, "evaluate_every": 20, "log_every": 5}
        base = base.model_copy(update=short | {"optimiser": base.optimiser.model_copy(update={"warmup": 10})})
    seeded = [base.model_copy(update={"seed": base.seed + more}) for more in range(SEEDS)]
    return [arm.over(config) for arm in ARMS for config in seeded]


def place(run: RunResult) -> Place:
    """Where a run stands."""
    return Place(arm_of(ARMS, run.config))


def answer(results: Sequence[RunResult], rows: Sequence[Likeness] = ()) -> Answer:
    """What the missing factor costs in held-out loss, and what it does to the rows of attention."""
    arms = grouped(results, place)
    gap = versus(arms.get(Place(UNSCALED), []), arms.get(Place(SCALED), []))
    ended = {name: {figure: _end(arms.get(Place(name), []), figure) for figure in FIGURES} for name in (SCALED, UNSCALED)}
    sentence = (
        f"The model without the factor {verdict(gap, 'is behind', 'is ahead of')} the one with 1/√64: the difference in "
        f"held-out loss is {gap} nats a byte. At the end {_percent(ended[UNSCALED])} of its rows put more than 0.99 of their "
        f"weight on one key, with the factor {_percent(ended[SCALED])}.{losses_told(arms)}"
    )
    curves = {figure: [figure_series(key.model, found, figure) for key, found in arms.items()] for figure in FIGURES}
    return Answer(
        sentence,
        signed(gap, "nats"),
        tables=(
            compared_table(
                "Held-out loss at the end",
                ("model",),
                arms,
                against_base(arms, lambda _: Place(SCALED)),
                against=SCALED,
                what="loss, nats a byte",
            ),
            Table(
                "Attention at the last logged step",
                ("model", "largest |scale·q·k|", "saturated", "entropy / ln n", "gain"),
                tuple((key.model, *(number(ended[key.model][figure], ".3g") for figure in FIGURES)) for key in arms),
                "Means over heads, layers and seeds, on the batch of that step.",
            ),
            _files(rows),
        ),
        charts=(
            Chart(
                "Held-out loss", "step", "nats a byte", tuple(validation_series(key.model, found) for key, found in arms.items())
            ),
            Chart("Share of saturated rows", "step", "largest weight > 0.99", tuple(curves["saturated_share"])),
            Chart("Entropy over ln n", "step", "entropy / ln n", tuple(curves["normalized_entropy"])),
        ),
        limits=(
            TEXT_LIMIT,
            "One learning rate for both; that the model without the factor would do better at another is not asked here.",
            few_seeds(arms),
            *_other_text(results),
        ),
    )


def _end(found: Sequence[RunResult], figure: str) -> float:
    return spread([last(run, figure) for run in found if run.status == "done"]).mean


def _percent(figures: dict[str, float]) -> str:
    return number(figures["saturated_share"], ".0%") or "—"


def _files(rows: Sequence[Likeness]) -> Table:
    lines = tuple((f"{row.model}.safetensors", str(row.seed), str(row.tensors), str(row.same)) for row in rows)
    note = (
        f"Written into the sweep's folder, with {PROVENANCE}. A tensor is as in the package where every bit is: after all "
        "steps, with the same text and torch, on the same kind of processor. Others round differently."
    )
    return Table("The models as files", ("file", "seed", "tensors", "of them as in the package"), lines, note)


def _other_text(results: Sequence[RunResult]) -> tuple[str, ...]:
    texts = dict.fromkeys(run.data for run in results if run.data and PINNED_SHA256 not in run.data)
    return tuple(f"The package's own models learned from the help topics of {PINNED_TEXT}, these from {text}." for text in texts)


PRESET = Preset(
    "examples",
    "What does the missing factor do to two models that are equal but for it?",
    ("Vaswani et al. 2017, arXiv 1706.03762, section 3.2.1",),
    runs,
    answer,
    Further(Likeness, likenesses),
    Product(check, make, PROVENANCE),
)
