"""Trained short, tested long: does a factor in ln n help?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from attemper.lab.comparing import spread
from attemper.lab.config import After, RunConfig
from attemper.lab.presets.arms import TEXT_LIMIT, USUAL, Arm, arm_of, seeded, text_base
from attemper.lab.presets.grouping import grouped, series_of
from attemper.lab.presets.preset import Effort, Preset
from attemper.lab.presets.telling import NONE, against_base, compared_table, few_seeds, losses_told, signed, verdict
from attemper.lab.store.results import RunResult
from attemper.report.sweeps import Answer, Chart, Table

FIXED, LEARNED = "ln n, fixed", "ln n, learned (SSMax)"
ARMS = tuple(
    Arm(name, {"model.rule": rule})
    for name, rule in ((USUAL, "inverse_sqrt"), (FIXED, "log_length"), (LEARNED, "log_length_learned"))
)
TIMES = (1, 2, 4, 8, 16)


class Place(NamedTuple):
    """An arm."""

    arm: str


def runs(effort: Effort) -> list[RunConfig]:
    """A decoder without positions, which alone would fail at lengths that it has not seen."""
    base = text_base(effort, quick_steps=250, full_steps=1500, position="none")
    lengths = tuple(base.task.length * times for times in TIMES)
    base = base.model_copy(update={"after": After(lengths=lengths)})
    return seeded([arm.over(base) for arm in ARMS], 3 if effort == "quick" else 5)


def place(run: RunResult) -> Place:
    """Where a run stands."""
    return Place(arm_of(ARMS, run.config))


def by_length(run: RunResult) -> dict[int, float]:
    """The loss at each length."""
    return {int(at): loss for at, loss in run.losses("length").items()}


def excess(length: int) -> Callable[[RunResult], float]:
    """The loss at a length above that at the length of the training."""

    def of(run: RunResult) -> float:
        losses = by_length(run)
        return losses.get(length, float("nan")) - losses.get(run.config.task.length, float("nan"))

    return of


def answer(results: Sequence[RunResult], _rows: Sequence[Any] = ()) -> Answer:
    """How much more a long text costs, rule by rule."""
    arms = grouped(results, place)
    lengths = sorted({length for found in arms.values() for run in found for length in by_length(run)})
    trained = results[0].config.task.length
    longest = lengths[-1] if lengths else trained
    more = spread([excess(longest)(run) for run in arms.get(Place(USUAL), [])])
    tests = against_base(arms, lambda _: Place(USUAL), excess(longest))
    fixed, learned = (tests.get(Place(name), NONE) for name in (FIXED, LEARNED))
    sentence = (
        f"Trained at {trained} bytes and tested at {longest}, a decoder with 1/√d changes its loss by "
        f"{more.told('+.3f')} "
        "nats a byte. With a fixed factor in ln n that change "
        f"{verdict(fixed, 'is larger than', 'is smaller than')} with 1/√d: the "
        f"difference is {fixed}. With a learned one it "
        f"{verdict(learned, 'is larger than', 'is smaller than')} with 1/√d: {learned}."
        f"{losses_told(arms)}"
    )
    return Answer(
        sentence,
        signed(fixed, "nats"),
        tables=(
            compared_table(
                f"Loss at {longest} bytes above that at {trained}",
                ("rule",),
                arms,
                tests,
                value=excess(longest),
                what="difference, nats a byte",
            ),
            _losses(arms, lengths),
        ),
        charts=(
            Chart(
                "Held-out loss over the length",
                "bytes of an example",
                "nats a byte",
                tuple(series_of(key.arm, found, by_length) for key, found in arms.items()),
                log_x=True,
                note="All lengths are judged on about as many bytes. Bands are one standard deviation over the seeds.",
            ),
        ),
        limits=(
            TEXT_LIMIT,
            (
                "Without positions: under rotary ones, unseen distances are a second difficulty, which no factor on "
                "the logits removes by itself."
            ),
            "A byte's loss depends on near text; a task that asks for one far token would show dilution more.",
            few_seeds(arms),
        ),
    )


def _losses(arms: Mapping[Place, Sequence[RunResult]], lengths: Sequence[int]) -> Table:
    found = {key: [by_length(run) for run in runs] for key, runs in arms.items()}
    rows = [
        (str(length), *(str(spread([each[length] for each in losses if length in each])) for losses in found.values()))
        for length in lengths
    ]
    return Table("Held-out loss, nats a byte", ("bytes", *(key.arm for key in arms)), tuple(rows))


PRESET = Preset(
    "length",
    "Trained short and tested long: does a factor in ln n keep attention as sharp as it was?",
    ("Nakanishi 2025, arXiv 2501.19399 (SSMax)", "arXiv 2510.05554"),
    runs,
    answer,
    given=("task.length", "after.lengths", "model.position"),
)
