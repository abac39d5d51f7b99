"""From a folder of runs to what a page or a terminal shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from attemper.errors import LoadError
from attemper.lab.comparing import spread
from attemper.lab.further import further_rows
from attemper.lab.presets import NAMES, preset
from attemper.lab.product import make_product
from attemper.lab.store.results import RunResult
from attemper.lab.sweep import read, results
from attemper.lab.table import flat
from attemper.report.sweeps import Answer, SweepView, Table


def view_of(folder: Path) -> SweepView:
    """The answer of the preset; of a configuration of one's own, its runs side by side.

    Raises:
        LoadError: no run is over, or some are not that the preset's answer needs. ArgumentError: what the preset makes of its
            models cannot be written.
    """
    sweep, found = read(folder), results(folder)
    missing = len(sweep.runs) - len(found)
    if missing:
        raise LoadError(
            f"{folder}: {missing} of {len(sweep.runs)} runs are not over; `attemper lab resume {folder}` goes on with them"
        )
    if sweep.effort and sweep.name in NAMES:  # a file may be called as a preset is
        asked = preset(sweep.name)
        effort = "full" if sweep.effort == "full" else "quick"
        rows = further_rows(folder, asked.further, found, effort)
        make_product(folder, asked.product, found)
        question, sources, answer = asked.question, asked.sources, asked.answer(found, rows)
        if set(sweep.runs) != set(asked.runs(effort)):
            changed = (
                f"The runs are not the preset's own but those of `{sweep.command}`; what else is said of sizes, texts "
                "and seeds may be true of the preset's own alone."
            )
            answer = replace(answer, limits=(changed, *answer.limits))
    else:
        question, sources, answer = f"What do the runs of {sweep.name} come to?", (), plain_answer(found)
    seconds = sum(result.seconds for result in found)
    machines = ", ".join(dict.fromkeys(result.machine for result in found))
    return SweepView(sweep.name, question, answer, sources, sweep.command, len(found), seconds, machines)


def plain_answer(found: list[RunResult]) -> Answer:
    """The runs by what was varied, with means over the seeds; nothing is claimed."""
    rows = [flat(result.config.model_dump(mode="json")) for result in found]
    varied = [name for name in rows[0] if name != "seed" and len({str(row[name]) for row in rows}) > 1]
    arms: dict[tuple[str, ...], list[RunResult]] = {}
    for row, result in zip(rows, found, strict=True):
        arms.setdefault(tuple(str(row[name]) for name in varied), []).append(result)
    lines = [
        (*key, str(spread([run.loss for run in runs])), f"{spread([run.accuracy for run in runs]).mean:.3f}", str(len(runs)),
         str(sum(run.status == "diverged" for run in runs)))
        for key, runs in arms.items()
    ]  # fmt: skip
    header = (*varied, "loss, nats", "accuracy", "seeds", "diverged")
    tables = (Table("Held-out loss at the end", header, tuple(lines)),)
    losses = {key: spread([run.loss for run in runs]) for key, runs in arms.items()}
    known = {key: loss for key, loss in losses.items() if loss.count}
    if not known:
        return Answer("Every run diverged: there is no loss to tell.", "none", tables)
    best = min(known, key=lambda key: known[key].mean)
    named = ", ".join(f"{name} = {value}" for name, value in zip(varied, best, strict=True)) or "its only arm"
    gone = sum(run.status == "diverged" for run in found)
    told = f" {gone} of {len(found)} runs diverged, and are in no mean." if gone else ""
    sentence = (
        f"The lowest mean held-out loss is {known[best]} nats a scored position, of {named}.{told} "
        "No test is made here: see `attemper lab compare`."
    )
    return Answer(sentence, f"{known[best].mean:.3f} nats", tables)
