"""The results of the lab in the documents: those of every preset, as the command writes them."""

import re
from pathlib import Path

import pytest

from attemper.lab.presets import NAMES, preset
from docs.pages.lab_results import lab_results
from tests.running import ROOT

RESULTS = ROOT / "docs" / "lab"


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_has_results_with_their_command_and_time(name: str) -> None:
    answer = (RESULTS / name / "answer.txt").read_text("utf-8")
    assert answer.startswith(preset(name).question + "\n\n")
    made = answer.rstrip().splitlines()[-1]
    assert re.fullmatch(rf"Made by `attemper lab run {name}[^`]*`: \d+ runs, \d+ s of training in all, on .+\.", made)
    assert (RESULTS / name / "page.html").read_text("utf-8").startswith("<!doctype html>")
    assert (RESULTS / name / "table.parquet").stat().st_size < 100_000


def test_the_page_has_every_answer_and_what_it_was_made_of(tmp_path: Path) -> None:
    folder = tmp_path / "convergence"
    folder.mkdir()
    (folder / "answer.txt").write_text("Why?\n\nBecause.\n\nMade by `attemper lab run convergence`: 2 runs.\n")
    (folder / "table.parquet").touch()
    text = lab_results(tmp_path)
    assert text == (
        "## convergence\n\nMade by `attemper lab run convergence`: 2 runs.\n\nThe page with its curves, and the tables: "
        "[page.html](lab/convergence/page.html), [table.parquet](lab/convergence/table.parquet).\n\n"
        "```text\nWhy?\n\nBecause.\n```\n"
    )
