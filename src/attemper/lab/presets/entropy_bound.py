"""How near is measured entropy to the bound that follows from the spectral norms of the weights?

    Of a row of T logits with ‖z‖₂ ≤ σ:   H ≥ ln(1 + (T−1)·β) + σ·√(T(T−1))·β / (1 + (T−1)·β),   β = exp(−σ·√(T/(T−1)))

(Zhai et al. 2023, theorem 3.1), with σ = scale · ‖W_q·W_kᵀ‖₂ · ‖X·Xᵀ‖₂. The bound is also taken with the row's own norm about its
mean in the place of σ: what is lost there is lost by the shape of the row, the rest by the norms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from attemper.lab.comparing import spread, told
from attemper.lab.config import RunConfig
from attemper.lab.presets.arms import RULES, TEXT_LIMIT, USUAL, arm_of, seeded, text_base
from attemper.lab.presets.bounded import MEASURABLE, measured_rows
from attemper.lab.presets.grouping import figure_series, grouped, validation_series
from attemper.lab.presets.preset import Effort, Further, Preset
from attemper.lab.presets.telling import few_seeds, losses_told, number, verdict, versus
from attemper.lab.store.results import RunResult
from attemper.report.sweeps import Answer, Chart, Table

ARMS = tuple(arm for arm in RULES if arm.name in ("none", USUAL, "1/d"))


class Place(NamedTuple):
    """An arm."""

    arm: str


class Row(NamedTuple):
    """One head of a trained model, over the held-out text's last position, which sees all.

    Attributes:
        run, layer, head: which. keys: T. weights, inputs: the two spectral norms, the second a mean over examples. sigma: their
            product with the scale. row_norm: mean ‖z − mean z‖₂. entropy: mean, in nats. from_row, from_sigma: mean bound from
            the row's own norm, and from σ.
        below: rows whose entropy is below the bound from σ, by more than rounding.
    """

    run: str
    layer: int
    head: int
    keys: int
    weights: float
    inputs: float
    sigma: float
    row_norm: float
    entropy: float
    from_row: float
    from_sigma: float
    below: int


def runs(effort: Effort) -> list[RunConfig]:
    """Three rules with learned positions: rotary ones stand between q and k, where the theorem has none."""
    base = text_base(effort, quick_steps=200, full_steps=1000, position="learned")
    return seeded([arm.over(base) for arm in ARMS], 3 if effort == "quick" else 5)


def place(run: RunResult) -> Place:
    """Where a run stands."""
    return Place(arm_of(ARMS, run.config))


def measure(results: Sequence[RunResult], effort: Effort) -> list[Row]:
    """The heads of every model that was trained to the end."""
    examples = 16 if effort == "quick" else 128
    return [Row(run.id, *figures) for run in results if run.status == "done" for figures in measured_rows(run, examples)]


def answer(results: Sequence[RunResult], rows: Sequence[Row] = ()) -> Answer:
    """Entropy beside its bounds, and whether both order the rules alike."""
    arms = grouped(results, place)
    of_run: dict[str, list[Row]] = {}
    for row in rows:
        of_run.setdefault(row.run, []).append(row)
    usual = [row for run in arms.get(Place(USUAL), []) for row in of_run.get(run.id, [])]
    below = sum(row.below for row in rows)
    entropy, from_row, from_sigma, sigma = (
        spread([getattr(row, name) for row in usual]).mean for name in ("entropy", "from_row", "from_sigma", "sigma")
    )
    none = versus(arms.get(Place("none"), []), arms.get(Place(USUAL), []), lambda run: _mean(of_run.get(run.id, []), "entropy"))
    sentence = (
        f"With 1/√d the mean entropy of trained heads is {told(entropy, '.2f')} nats of at most "
        f"{told(math.log(usual[0].keys) if usual else math.nan, '.2f')}. "
        f"The bound from the spectral norms says at least {told(from_sigma, '.2g')} (σ = {told(sigma, '.3g')}); "
        "that from each row's own norm "
        f"{told(from_row, '.2g')}. {below} of all rows fall below the first. Entropy without a scale "
        f"{verdict(none, 'is higher than', 'is lower than')} with 1/√d: the difference is {none}.{losses_told(arms)}"
    )
    return Answer(
        sentence,
        f"{told(from_sigma, '.2g')} ≤ {told(entropy, '.2f')} nats",
        tables=(_table(arms, of_run), _heads(arms, of_run)),
        charts=(
            Chart(
                "Entropy over ln n",
                "step",
                "entropy / ln n",
                tuple(figure_series(key.arm, found, "normalized_entropy") for key, found in arms.items()),
                note="Bands are one standard deviation over the seeds.",
            ),
            Chart(
                "Held-out loss", "step", "nats a byte", tuple(validation_series(key.arm, found) for key, found in arms.items())
            ),
        ),
        limits=(
            TEXT_LIMIT,
            (
                "The theorem holds for any weights: that no row falls below shows that it was computed rightly, not "
                "that it predicts anything."
            ),
            "σReparam itself is not trained here, only the bound that argues for it.",
            few_seeds(arms),
        ),
    )


def _mean(rows: Sequence[Row], name: str) -> float:
    return spread([getattr(row, name) for row in rows]).mean


_NAMES = ("sigma", "row_norm", "entropy", "from_row", "from_sigma")
_HEADER = ("σ", "‖z − mean‖₂", "entropy, nats", "bound from the row", "bound from σ")


def _table(arms: Mapping[Place, Sequence[RunResult]], of_run: Mapping[str, Sequence[Row]]) -> Table:
    lines = []
    for key, found in arms.items():
        known = [of_run[run.id] for run in found if run.id in of_run]
        means = [spread([_mean(each, name) for each in known]) for name in _NAMES]
        cells = [told(mean.mean, ".3g") + ("" if math.isnan(mean.sd) else f" ± {mean.sd:.2g}") for mean in means]
        lines.append(
            (key.arm, *cells, str(sum(row.below for each in known for row in each)), f"{len(found) - len(known)} of {len(found)}")
        )
    note = "Means over layers, heads and examples; ± over the seeds. Below: rows whose entropy is below the bound from σ."
    return Table("Entropy and its bounds", ("rule", *_HEADER, "below", "diverged"), tuple(lines), note)


def _heads(arms: Mapping[Place, Sequence[RunResult]], of_run: Mapping[str, Sequence[Row]]) -> Table:
    lines = []
    for key, found in arms.items():
        each = [row for run in found for row in of_run.get(run.id, [])]
        for layer, head in sorted({(row.layer, row.head) for row in each}):
            here = [row for row in each if (row.layer, row.head) == (layer, head)]
            lines.append(
                (key.arm, str(layer), str(head), *(number(_mean(here, name), ".3g") for name in ("weights", "inputs", *_NAMES)))
            )
    return Table(
        "Head by head", ("rule", "layer", "head", "‖W_q·W_kᵀ‖₂", "‖X·Xᵀ‖₂", *_HEADER), tuple(lines), "Means over the seeds."
    )


PRESET = Preset(
    "entropy-bound",
    "How near is the entropy of trained attention to the bound of σReparam?",
    ("Zhai et al. 2023, arXiv 2303.06296, theorem 3.1",),
    runs,
    answer,
    Further(Row, measure),
    given=MEASURABLE,
)
