"""Does it matter to divide by √d_k? One decoder under six rules, from narrow heads to wide ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, Literal, NamedTuple

from attemper.lab.comparing import spread, told
from attemper.lab.config import Model, Optimiser, RunConfig, Task
from attemper.lab.presets.arms import RULES, USUAL, Arm, arm_of, head_width
from attemper.lab.presets.grouping import figure_series, first, grouped, validation_series
from attemper.lab.presets.preset import Effort, Preset
from attemper.lab.presets.telling import against_base, compared_table, few_seeds, losses_told, signed, verdict, versus
from attemper.lab.store.results import RunResult
from attemper.report.sweeps import Answer, Chart, Table

SHORT = tuple(arm for arm in RULES if arm.name in ("none", USUAL))


class Size(NamedTuple):
    """Of an effort."""

    widths: tuple[int, ...]
    seeds: int
    steps: int
    batch: int
    context: int
    log_every: int


QUICK = Size((16, 512), 3, 120, 16, 32, 5)
FULL = Size((16, 64, 128, 256, 512), 5, 400, 16, 64, 10)


def runs(effort: Effort) -> list[RunConfig]:
    """Six rules where q and k start with unit variance; two of them also from PyTorch's own start."""
    size = QUICK if effort == "quick" else FULL
    wanted: list[tuple[Literal["unit", "torch"], Arm]] = [("unit", arm) for arm in RULES]
    wanted += [("torch", arm) for arm in SHORT]
    return [
        arm.over(
            RunConfig(
                task=Task(name="text", length=size.context),
                model=Model(layers=2, heads=2, width=64, head_dim=width, init=init),
                optimiser=Optimiser(learning_rate=3e-3, warmup=20),
                steps=size.steps,
                batch=size.batch,
                evaluate_every=size.steps // 8,
                log_every=size.log_every,
                seed=seed,
            )
        )
        for width, (init, arm), seed in product(size.widths, wanted, range(size.seeds))
    ]


class Place(NamedTuple):
    """Where a run stands: how the weights started, how wide a head is, which arm."""

    init: str
    width: int
    arm: str


def place(run: RunResult) -> Place:
    """Of a run."""
    return Place(run.config.model.init, head_width(run.config), arm_of(RULES, run.config))


def answer(results: Sequence[RunResult], _rows: Sequence[Any] = ()) -> Answer:
    """The gap between no scale and 1/√d at the widest heads, with its test; the other arms beside it."""
    arms = grouped(results, place)
    arms = {key: arms[key] for key in sorted(arms, key=lambda key: (key.init != "unit", key.width))}
    widest = max(key.width for key in arms)
    gap = versus(arms.get(Place("unit", widest, "none"), []), arms.get(Place("unit", widest, USUAL), []))
    start = {name: _first(arms, Place("unit", widest, name)) for name in ("none", USUAL, "1/d")}
    none, usual, inverse = (start[name] for name in ("none", USUAL, "1/d"))
    sentence = (
        f"At d_k = {widest}, with q and k of unit variance at the start, no scale "
        f"{verdict(gap, 'is behind', 'is ahead of')} 1/√d: the difference in held-out loss is "
        f"{gap} nats a byte. At the first step rows without a scale have {told(none[0], '.2f')} of the entropy of "
        f"uniform weights and a gain of {told(none[1], '.2f')}, with 1/√d {told(usual[0], '.2f')} and {told(usual[1], '.2f')}, "
        f"with 1/d {told(inverse[0], '.4f')} and {told(inverse[1], '.2f')}."
        f"{losses_told(arms)}"
    )
    return Answer(
        sentence,
        signed(gap, "nats"),
        tables=(
            compared_table(
                "Held-out loss at the end",
                ("start", "d_k", "rule"),
                arms,
                against_base(arms, lambda key: key._replace(arm=USUAL)),
                what="loss, nats a byte",
            ),
            _starts(arms),
        ),
        charts=_charts(arms, widest),
        limits=(
            "One small decoder on one text, trained briefly: it says how training begins, not where it ends.",
            "One learning rate for all arms; that an arm would do better at another is a question of its own (lr-sensitivity).",
            few_seeds(arms),
            "Wider heads have more parameters, so losses are compared within a width, not between widths.",
        ),
    )


def _first(arms: dict[Place, list[RunResult]], key: Place) -> tuple[float, float]:
    runs = arms.get(key, [])
    return spread([first(run, "normalized_entropy") for run in runs]).mean, spread([first(run, "gain") for run in runs]).mean


def _starts(arms: dict[Place, list[RunResult]]) -> Table:
    rows = []
    for key, runs in arms.items():
        into = [[getattr(run.curves, name)[0].mean().item() for run in runs] for name in ("q_gradient", "k_gradient")]
        figures = [spread([first(run, name) for run in runs]).mean for name in ("normalized_entropy", "gain", "saturated_share")]
        most = spread([run.curves.figures["max_scaled_product"][0].max().item() for run in runs]).mean
        rows.append(
            (
                key.init,
                str(key.width),
                key.arm,
                f"{most:.3g}",
                *(f"{value:.4f}" for value in figures),
                *(f"{spread(values).mean:.3g}" for values in into),
            )
        )
    header = ("start", "d_k", "rule", "largest |scale·q·k|", "entropy / ln n", "gain", "saturated", "‖∂W_q‖", "‖∂W_k‖")
    note = "Before the first step, means over layers, heads and seeds; the gradients are Frobenius norms of the loss's, a layer."
    return Table("At the start", header, tuple(rows), note)


def _charts(arms: dict[Place, list[RunResult]], widest: int) -> tuple[Chart, ...]:
    here = {arm.name: arms[key] for arm in RULES if (key := Place("unit", widest, arm.name)) in arms}
    losses = tuple(validation_series(name, runs) for name, runs in here.items())
    entropies = tuple(figure_series(name, runs, "normalized_entropy") for name, runs in here.items())
    gains = tuple(figure_series(name, runs, "gain") for name, runs in here.items())
    title = f"d_k = {widest}, unit variance"
    return (
        Chart(f"Held-out loss, {title}", "step", "nats a byte", losses, note="Bands are one standard deviation over the seeds."),
        Chart(f"Entropy over ln n, {title}", "step", "entropy / ln n", entropies),
        Chart(f"Gain 1 − Σ p², {title}", "step", "gain", gains),
    )


PRESET = Preset(
    "convergence",
    "Does dividing by √d_k matter to how a transformer trains?",
    ("Vaswani et al. 2017, arXiv 1706.03762, section 3.2.1", "Henry et al. 2020, arXiv 2010.04245"),
    runs,
    answer,
    free=("model.head_dim",),
)
