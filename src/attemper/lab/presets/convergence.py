"""Does it matter to divide by √d_k? One decoder under six rules, from narrow heads to wide ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Literal, NamedTuple

from attemper.lab.comparing import Paired, holm, paired, spread
from attemper.lab.config import Model, Optimiser, RuleName, RunConfig, Task
from attemper.lab.presets.grouping import by_seed, figure_series, first, grouped, validation_series
from attemper.lab.presets.preset import Effort, Preset
from attemper.lab.store.results import RunResult
from attemper.report.sweeps import Answer, Chart, Table

USUAL = "1/√d"


class Arm(NamedTuple):
    """A rule, with or without a norm on q and k."""

    name: str
    rule: RuleName
    qk_norm: bool = False


ARMS = (
    Arm("none", "none"),
    Arm(USUAL, "inverse_sqrt"),
    Arm("1/d", "inverse"),
    Arm("learned", "learned"),
    Arm("QK-norm and 1/√d", "inverse_sqrt", qk_norm=True),
    Arm("cosine", "cosine"),
)
SHORT = tuple(arm for arm in ARMS if arm.name in ("none", USUAL))


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
    wanted: list[tuple[Literal["unit", "torch"], Arm]] = [("unit", arm) for arm in ARMS]
    wanted += [("torch", arm) for arm in SHORT]
    return [
        RunConfig(
            task=Task(name="text", length=size.context),
            model=Model(layers=2, heads=2, width=64, head_dim=width, rule=arm.rule, qk_norm=arm.qk_norm, init=init),
            optimiser=Optimiser(learning_rate=3e-3, warmup=20),
            steps=size.steps,
            batch=size.batch,
            evaluate_every=size.steps // 8,
            log_every=size.log_every,
            seed=seed,
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
    model = run.config.model
    arm = next(arm for arm in ARMS if (arm.rule, arm.qk_norm) == (model.rule, model.qk_norm))
    assert isinstance(model.head_dim, int)
    return Place(model.init, model.head_dim, arm.name)


def answer(results: Sequence[RunResult]) -> Answer:
    """The gap between no scale and 1/√d at the widest heads, with its test; the other arms beside it."""
    arms = grouped(results, place)
    widths = sorted({key.width for key in arms})
    widest = widths[-1]
    gap = _gap(arms, Place("unit", widest, "none"))
    start = {name: _first(arms, Place("unit", widest, name)) for name in ("none", USUAL, "1/d")}
    none, usual, inverse = (start[name] for name in ("none", USUAL, "1/d"))
    verdict = "is behind" if gap.clear and gap.mean > 0 else "is ahead of" if gap.clear else "is not told apart from"
    sentence = (
        f"At d_k = {widest}, with q and k of unit variance at the start, no scale {verdict} 1/√d: the difference in held-out "
        f"loss is {gap} nats a byte. At the first step rows without a scale have {none[0]:.2f} of the entropy of uniform "
        f"weights and a gain of {none[1]:.2f}, with 1/√d {usual[0]:.2f} and {usual[1]:.2f}, "
        f"with 1/d {inverse[0]:.4f} and {inverse[1]:.2f}."
    )
    return Answer(
        sentence,
        f"{gap.mean:+.3f} nats",
        tables=(_table(arms, widths), _starts(arms, widths)),
        charts=_charts(arms, widest),
        limits=(
            "One small decoder on one text, trained briefly: it says how training begins, not where it ends.",
            "One learning rate for all arms; that an arm would do better at another is a question of its own (lr-sensitivity).",
            f"{_seeds(arms)} seeds: a paired t test over them takes differences as normal, and sees large gaps alone.",
            "Wider heads have more parameters, so losses are compared within a width, not between widths.",
        ),
    )


def _gap(arms: dict[Place, list[RunResult]], key: Place) -> Paired:
    pairs = by_seed(arms.get(key, []), arms.get(key._replace(arm=USUAL), []))
    return paired([one.loss for one, _ in pairs], [two.loss for _, two in pairs])


def _first(arms: dict[Place, list[RunResult]], key: Place) -> tuple[float, float]:
    runs = arms.get(key, [])
    return spread([first(run, "normalized_entropy") for run in runs]).mean, spread([first(run, "gain") for run in runs]).mean


def _seeds(arms: dict[Place, list[RunResult]]) -> int:
    return max(len(runs) for runs in arms.values())


def _table(arms: dict[Place, list[RunResult]], widths: Sequence[int]) -> Table:
    rows = []
    keys = [key for key in arms if key.arm != USUAL]
    tests = {key: _gap(arms, key) for key in keys}
    raised = dict(zip(keys, holm([tests[key].p for key in keys]), strict=True))
    for key in sorted(arms, key=lambda key: (key.init != "unit", widths.index(key.width))):
        losses = spread([run.loss for run in arms[key]])
        diverged = sum(run.status == "diverged" for run in arms[key])
        test = tests.get(key)
        rows.append(
            (
                key.init,
                str(key.width),
                key.arm,
                str(losses),
                "" if test is None else f"{test.mean:+.3f}",
                "" if test is None else f"{test.low:+.3f} to {test.high:+.3f}",
                "" if test is None else f"{test.p:.2g}",
                "" if test is None else f"{raised[key]:.2g}",
                str(diverged),
            )
        )
    return Table(
        "Held-out loss at the end",
        ("start", "d_k", "rule", "loss, nats a byte", "minus 1/√d", "95 % interval", "p", "p, Holm", "diverged"),
        tuple(rows),
        "Mean ± standard deviation over the seeds. The difference is taken seed by seed: the same seed draws the same weights "
        "and the same examples. p is that of a paired t test; Holm's takes into account how many tests there are.",
    )


def _starts(arms: dict[Place, list[RunResult]], widths: Sequence[int]) -> Table:
    rows = []
    for key in sorted(arms, key=lambda key: (key.init != "unit", widths.index(key.width))):
        runs = arms[key]
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
    here = {arm.name: arms[key] for arm in ARMS if (key := Place("unit", widest, arm.name)) in arms}
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
)
