"""Where does attention in 16 bits break, and what does each remedy give?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from attemper.lab.comparing import spread
from attemper.lab.config import RunConfig
from attemper.lab.presets.arms import USUAL, Arm, arm_of, head_width, seeded, text_base
from attemper.lab.presets.grouping import grouped, validation_series
from attemper.lab.presets.preset import Effort, Further, Preset
from attemper.lab.presets.remedies import Rounding, roundings
from attemper.lab.presets.telling import NONE, against_base, compared_table, few_seeds, losses_told, number, verdict, versus
from attemper.lab.store.results import RunResult
from attemper.report.sweeps import Answer, Chart, Series, Table


def _arm(
    name: str, arithmetic: str, rule: str, *, qk_norm: bool = False, softcap: float | None = None, loss_scale: Any = 1.0
) -> Arm:
    return Arm(
        name,
        {
            "precision.arithmetic": arithmetic,
            "precision.loss_scale": loss_scale,
            "model.rule": rule,
            "model.qk_norm": qk_norm,
            "model.softcap": softcap,
        },
    )


EXACT, NAIVE, SCALED = "float32, 1/√d", "naive, no scale", f"naive, {USUAL}"
SAFE, SAFE_IN_16 = "maximum subtracted in float32, no scale", "maximum subtracted in 16 bits, no scale"
ARMS = (
    _arm(EXACT, "fp32", "inverse_sqrt"),
    _arm("float32, no scale", "fp32", "none"),
    _arm(NAIVE, "fp16_naive", "none"),
    _arm(SCALED, "fp16_naive", "inverse_sqrt"),
    _arm("naive, 1/√d and QK-norm", "fp16_naive", "inverse_sqrt", qk_norm=True),
    _arm("naive, no scale, softcap 10", "fp16_naive", "none", softcap=10.0),
    _arm("naive, no scale, loss scaled", "fp16_naive", "none", loss_scale="dynamic"),
    _arm("naive, 1/√d, loss scaled", "fp16_naive", "inverse_sqrt", loss_scale="dynamic"),
    _arm("naive in bfloat16, no scale", "bf16_naive", "none"),
    _arm(SAFE_IN_16, "fp16_safe", "none"),
    _arm(SAFE, "fp16", "none"),
    _arm("maximum subtracted in float32, 1/√d", "fp16", "inverse_sqrt"),
    _arm("maximum subtracted in float32, 1/√d, loss scaled", "fp16", "inverse_sqrt", loss_scale="dynamic"),
)


class Place(NamedTuple):
    """A head width and an arm."""

    width: int
    arm: str


def runs(effort: Effort) -> list[RunConfig]:
    """Thirteen ways at narrow and at wide heads."""
    widths = (16, 128) if effort == "quick" else (16, 64, 256)
    made = [arm.over(text_base(effort, quick_steps=60, full_steps=400, head_dim=width)) for width in widths for arm in ARMS]
    return seeded(made, 3)


def place(run: RunResult) -> Place:
    """Where a run stands."""
    return Place(head_width(run.config), arm_of(ARMS, run.config))


def measure(_results: Sequence[RunResult], _effort: Effort) -> list[Rounding]:
    """Attention alone, at products of growing size."""
    return roundings()


def failed(runs: Sequence[RunResult]) -> str:
    """How many diverged, and at which steps."""
    steps = sorted(run.ended for run in runs if run.status == "diverged")
    return f"{len(steps)} of {len(runs)}" + (f", at step {', '.join(map(str, steps))}" if steps else "")


def breaks_at(rows: Sequence[Rounding], remedy: str) -> float:
    """The smallest standard deviation of the entries of q and k at which a row is lost; inf: none that was tried."""
    return min((row.size for row in rows if row.remedy == remedy and row.broken), default=math.inf)


def answer(results: Sequence[RunResult], rows: Sequence[Rounding] = ()) -> Answer:
    """Which trainings failed, what the others lose, and where attention alone breaks."""
    arms = grouped(results, place)
    widest = max(key.width for key in arms)
    naive, scaled, safe, in_16 = (arms.get(Place(widest, name), []) for name in (NAIVE, SCALED, SAFE, SAFE_IN_16))
    also = {"kept": versus(safe, scaled), "coarser": versus(in_16, safe)}
    tests = against_base(arms, lambda key: key._replace(arm=EXACT), also=also)
    lost, kept, coarser = tests.get(Place(widest, SCALED), NONE), tests["kept"], tests["coarser"]
    gone = sum(run.status == "diverged" for run in naive)
    sentence = (
        f"At d_k = {widest}, {gone} of {len(naive)} trainings with a float16 softmax that does not subtract the "
        "maximum, and no scale, "
        f"diverge; with 1/√d {sum(run.status == 'diverged' for run in scaled)} of {len(scaled)} do, and the loss "
        f"{verdict(lost, 'is above', 'is below')} that in float32: the difference is {lost}. Subtracting the "
        "maximum in place of the "
        f"scale ends {sum(run.status == 'done' for run in safe)} of {len(safe)} trainings, whose loss "
        f"{verdict(kept, 'is above', 'is below')} that of the scale: {kept}. Where the softmax that subtracts it is in 16 bits "
        f"too, {sum(run.status == 'done' for run in in_16)} of {len(in_16)} end, and the loss "
        f"{verdict(coarser, 'is above', 'is below')} that of one in float32: {coarser}.{_alone(rows)}{losses_told(arms)}"
    )
    here = {key.arm: found for key, found in arms.items() if key.width == widest}
    return Answer(
        sentence,
        f"{gone} of {len(naive)} diverge",
        tables=(
            compared_table(
                "Held-out loss at the end",
                ("d_k", "attention"),
                arms,
                tests,
                against=EXACT,
                what="loss, nats a byte",
                note="All matrix products but those in float32 arms are rounded to 16 bits.",
            ),
            _failures(arms),
            _rounding_table(rows),
        ),
        charts=(
            Chart(
                f"Held-out loss, d_k = {widest}", "step", "nats a byte", tuple(validation_series(n, f) for n, f in here.items())
            ),
            _chart(rows),
        ),
        limits=(
            (
                "16 bits are emulated on a CPU: sums in float32, rounded at the end, as matrix units do; other units "
                "may add up differently."
            ),
            "One small decoder, trained briefly: its products are far below those of large models (3e5 in Stable Diffusion 2.1).",
            "A loss scale keeps small gradients from vanishing; it cannot help a forward pass that has overflowed.",
            few_seeds(arms),
        ),
    )


def _alone(rows: Sequence[Rounding]) -> str:
    naive = breaks_at(rows, "naive")
    if math.isinf(naive):
        return ""
    at = next(row for row in rows if row.remedy == "naive" and row.size == naive)
    held = [name for name in dict.fromkeys(row.remedy for row in rows) if math.isinf(breaks_at(rows, name))]
    return (
        f" Attention alone, naive and without a scale, breaks at a largest logit of {at.logit:.3g} (entries of q and k of size "
        f"{naive:g}); no row is lost up to size {max(row.size for row in rows):g} with: "
        f"{', '.join(held) or 'none of the remedies'}."
    )


def _failures(arms: Mapping[Place, Sequence[RunResult]]) -> Table:
    lines = []
    for key, found in arms.items():
        products = [run.curves.figures["max_scaled_product"] for run in found]
        finite = [each[each.isfinite()] for each in products]  # a step that diverged has infinite ones
        most = spread([each.max().item() for each in finite if len(each)])
        lines.append((str(key.width), key.arm, failed(found), number(most.mean, ".3g")))
    note = (
        "Steps count from 0. The logit is the product of q and k as the arm rounds them, itself not rounded, in the steps that "
        "were logged; those that are no finite number are left out. Where the sum of the exponentials alone is infinite, all "
        "weights of a row are 0: nothing diverges, and only the loss tells."
    )
    return Table("What diverged, and when", ("d_k", "attention", "diverged", "largest |scale·q·k|"), tuple(lines), note)


def _rounding_table(rows: Sequence[Rounding]) -> Table:
    lines = tuple((row.remedy, f"{row.size:g}", f"{row.logit:.3g}", f"{row.broken:.0%}", number(row.error)) for row in rows)
    note = (
        "One head of d_k = 128 over 64 keys, with independent normal entries of q and k of the size given. "
        "Lost: no number, or zeros, since a sum of exponentials that is infinite leaves no key any weight. "
        "Error: root mean square against float64, relative to the values, of the other rows. "
        "QK-norm and softcap are measured against themselves."
    )
    return Table(
        "Attention alone in float16",
        ("remedy", "size of q and k", "largest |q·k|", "rows lost", "error"),
        lines,
        note,
    )


def _chart(rows: Sequence[Rounding]) -> Chart:
    series = []
    for remedy in dict.fromkeys(row.remedy for row in rows):
        points = [(row.size, row.broken) for row in rows if row.remedy == remedy]
        series.append(Series(remedy, tuple(size for size, _ in points), tuple(broken for _, broken in points)))
    return Chart("Rows lost", "size of the entries of q and k", "share", tuple(series), log_x=True)


PRESET = Preset(
    "fp16-overflow",
    "Where does attention in 16 bits break, and which remedy mends it?",
    (
        "Micikevicius et al. 2017, arXiv 1710.03740 (loss scaling)",
        "Milakov and Gimelshein 2018, arXiv 1805.02867 (the subtracted maximum)",
    ),
    runs,
    answer,
    Further(Rounding, measure),
    free=("model.head_dim",),
)  # fmt: skip
