"""From a folder of runs to what a page or a terminal shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from attemper.errors import LoadError
from attemper.lab.further import further_rows
from attemper.lab.plain import plain_answer
from attemper.lab.presets import NAMES, preset
from attemper.lab.product import make_product
from attemper.lab.sweep import read, results
from attemper.report.sweeps import SweepView


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
