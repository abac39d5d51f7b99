"""How large may logits get before a trained model breaks? They are multiplied by κ, and nothing else is changed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from attemper.lab.comparing import corrected, spread, told
from attemper.lab.config import After, RunConfig
from attemper.lab.presets.arms import TEXT_LIMIT, Arm, arm_of, seeded, text_base
from attemper.lab.presets.grouping import grouped, series_of
from attemper.lab.presets.preset import Effort, Preset
from attemper.lab.presets.telling import few_seeds, losses_told, verdict, versus
from attemper.lab.store.results import RunResult
from attemper.report.sweeps import Answer, Chart, Table

BREAK = 0.1  # nats above the loss at κ = 1: laid down before any run was made
FACTORS = tuple(2.0**power for power in range(-2, 13))


def _arm(name: str, arithmetic: str, qk_norm: bool) -> Arm:
    return Arm(name, {"precision.arithmetic": arithmetic, "model.qk_norm": qk_norm})


PLAIN, NORM, HALF = "float32", "float32, QK-norm", "float16"
ARMS = (_arm(PLAIN, "fp32", False), _arm(NORM, "fp32", True), _arm(HALF, "fp16", False), _arm("bfloat16", "bf16", False))


class Place(NamedTuple):
    """An arm."""

    arm: str


def runs(effort: Effort) -> list[RunConfig]:
    """Models with 1/√d, in three arithmetics and behind QK-norm, judged again at every κ."""
    base = text_base(effort, quick_steps=200, full_steps=1000)
    base = base.model_copy(update={"after": After(logit_factors=FACTORS)})
    return seeded([arm.over(base) for arm in ARMS], 3 if effort == "quick" else 5)


def place(run: RunResult) -> Place:
    """Where a run stands."""
    return Place(arm_of(ARMS, run.config))


def curve(run: RunResult) -> dict[float, float]:
    """The loss at each κ."""
    return run.losses("logit_factor")


def broken_at(losses: Mapping[float, float], limit: float = BREAK) -> float:
    """The κ above 1 from which the loss is more than `limit` above that at 1, between two that were tried by log κ; inf: none."""
    usual, last = losses.get(1.0, math.nan), (1.0, 0.0)
    for factor in sorted(factor for factor in losses if factor > 1):
        excess = losses[factor] - usual
        if not excess <= limit:  # NaN and infinity are broken
            if not math.isfinite(excess):
                return factor
            share = (limit - last[1]) / (excess - last[1])
            return math.exp(math.log(last[0]) + share * (math.log(factor) - math.log(last[0])))
        last = (factor, excess)
    return math.inf


def largest(run: RunResult) -> float:
    """The largest |logit| that was seen in the last logged step."""
    return run.curves.figures["max_scaled_product"][-1].max().item()


def log_break(run: RunResult) -> float:
    """log₂ of the κ that breaks it; NaN where none did."""
    at = broken_at(curve(run)) if run.status == "done" else math.nan
    return math.log2(at) if math.isfinite(at) else math.nan


def logit_at_break(run: RunResult) -> float:
    """The largest |logit| times that κ."""
    return largest(run) * 2 ** log_break(run) if run.status == "done" else math.nan


def answer(results: Sequence[RunResult], _rows: Sequence[Any] = ()) -> Answer:
    """κ and logit at which the loss breaks."""
    arms = grouped(results, place)
    usual, normed, half = (arms.get(Place(name), []) for name in (PLAIN, NORM, HALF))
    broken = [run for run in usual if math.isfinite(log_break(run))]
    kappa = 2 ** spread([log_break(run) for run in usual]).mean
    logit, before = (
        spread([logit_at_break(run) for run in usual]),
        spread([largest(run) for run in usual if run.status == "done"]),
    )
    norm, sixteen = corrected(dict(enumerate(versus(found, usual, log_break) for found in (normed, half)))).values()
    if broken:
        said = (
            f"Multiplying the logits of a trained model by κ = {kappa:.1f} (geometric mean of {len(broken)} "
            f"models) costs it {BREAK:g} "
            f"nats a byte; its largest logit is then {logit.told('.0f')}, and was {told(before.mean, '.1f')} before."
        )
    elif not any(run.status == "done" for run in usual):
        said = "No model in float32 was trained to the end."
    else:
        said = f"No κ up to {max(FACTORS):g} costs a model in float32 {BREAK:g} nats a byte."
    sentence = (
        f"{said} A model with QK-norm {verdict(norm, 'bears a larger κ than', 'bears a smaller κ than')} one "
        "without: the difference "
        f"of log₂ κ is {norm}. In float16 κ {verdict(sixteen, 'is larger than', 'is smaller than')} in float32: {sixteen}."
        f"{_never_told(arms)}{losses_told(arms)}"
    )
    return Answer(
        sentence,
        f"κ = {kappa:.1f}" if broken else "none",
        tables=(_table(arms), _losses(arms)),
        charts=(
            Chart(
                "Held-out loss over the factor on the logits",
                "κ",
                "nats a byte",
                tuple(series_of(key.arm, found, curve) for key, found in arms.items()),
                log_x=True,
                note="κ = 1 is the model as it was trained. Bands are one standard deviation over the seeds.",
            ),
        ),
        limits=(
            TEXT_LIMIT,
            f"What breaks is defined beforehand as {BREAK:g} nats above the loss at κ = 1; another bound gives another κ.",
            *_last_logged(results),
            "The model was not trained at this κ: one that is may bear more, and its gradients may fail before its loss does.",
            (
                "A factor on all logits sharpens every row at once; in large models single heads grow, so a small κ "
                "says nothing on the 1e4 of Wortsman et al."
            ),
            few_seeds(arms),
        ),
    )


def _never(found: Sequence[RunResult]) -> int:
    return sum(run.status == "done" and math.isinf(broken_at(curve(run))) for run in found)


def _never_told(arms: Mapping[Place, Sequence[RunResult]]) -> str:
    """A sentence, with a space before it, on models that bear every κ: tests without them make their arm look weaker."""
    held = ", ".join(f"{key.arm} {count} of {len(found)}" for key, found in arms.items() if (count := _never(found)))
    return f" No κ up to {max(FACTORS):g} breaks, and thus in no mean and no test of κ is: {held}." if held else ""


def _last_logged(results: Sequence[RunResult]) -> tuple[str, ...]:
    """At which step the largest logit was seen: with a large `log_every` that may be long before the end."""
    done = [run for run in results if run.status == "done"]
    if not done:
        return ()
    step = min(int(run.curves.steps[-1]) for run in done)
    return (f"The largest logit is that of the batch after {step} of {done[0].config.steps} steps, the last that was logged.",)


def _table(arms: Mapping[Place, Sequence[RunResult]]) -> Table:
    rows = []
    for key, found in arms.items():
        alive = [run for run in found if run.status == "done"]
        kappas = [broken_at(curve(run)) for run in alive]
        logits = spread([logit_at_break(run) for run in found])
        rows.append(
            (
                key.arm,
                str(spread([run.loss for run in found])),
                told(spread([largest(run) for run in alive]).mean, ".1f"),
                ", ".join("none" if math.isinf(kappa) else f"{kappa:.2g}" for kappa in kappas),
                told(logits.mean, ".0f"),
                f"{_never(found)} of {len(alive)}",
                f"{len(found) - len(alive)} of {len(found)}",
            )
        )
    header = (
        "arithmetic",
        "loss at κ = 1",
        "largest logit",
        "κ that breaks it, each seed",
        "largest logit there",
        "never",
        "diverged",
    )
    return Table("Where the loss breaks", header, tuple(rows), f"Broken: more than {BREAK:g} nats above the loss at κ = 1.")


def _losses(arms: Mapping[Place, Sequence[RunResult]]) -> Table:
    factors = sorted({factor for found in arms.values() for run in found for factor in curve(run)})
    curves = {key: [curve(run) for run in found] for key, found in arms.items()}
    rows = [
        (f"{factor:g}", *(str(spread([each[factor] for each in found if factor in each])) for found in curves.values()))
        for factor in factors
    ]
    return Table("Held-out loss, nats a byte", ("κ", *(key.arm for key in arms)), tuple(rows))


PRESET = Preset(
    "logit-threshold",
    "How large may logits get before a trained model breaks?",
    ("Wortsman et al. 2023, arXiv 2309.14322, section 3.1", "Kimi K2 2025, arXiv 2507.20534"),
    runs,
    answer,
    given=("after.logit_factors", "model.softcap"),  # a cap bounds the logit that is told
)
