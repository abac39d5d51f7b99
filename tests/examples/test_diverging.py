"""The example of a run that diverges: as a user runs it, and its judgement of runs."""

import importlib.util
import math
import re
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree as ET

import pytest

from attemper.monitor.runs import read_run
from tests.running import ROOT, run

SCRIPT = ROOT / "examples" / "diverging.py"
STEPS = 7


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("diverging", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["diverging"] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_it_runs_as_it_says(tmp_path: Path) -> None:
    printed = run(sys.executable, str(SCRIPT), "--out", str(tmp_path), "--steps", str(STEPS), "--seeds", "3")
    assert printed == (tmp_path / "table.md").read_text("utf-8")
    head, rule, *lines = printed.splitlines()
    assert head == "|  | seed 3 | seed 3 |"
    assert rule == "| --- | --- | --- |"
    cells = {line.split(" | ")[0].removeprefix("| "): line.removesuffix(" |").split(" | ")[1:] for line in lines}
    assert cells["QKClip"] == ["none", "100"]
    assert cells["the loss diverges"] == ["no", "no"]
    assert cells["largest \\|scale·q·k\\|"][0] == cells["largest \\|scale·q·k\\|"][1], (
        "the two began alike, and nothing was clipped"
    )
    for name in ("seed-3", "seed-3-clip"):
        read = read_run(tmp_path / f"{name}.jsonl")
        assert sorted(read.scalars) == list(range(STEPS))
        assert set(read.columns["layer"]) == {"blocks.0.attention", "blocks.1.attention"}
        assert max(read.columns["max_scaled_product"]) == pytest.approx(float(cells["largest \\|scale·q·k\\|"][0]), rel=1e-3)
    assert "clipped_heads" in read.scalars[0]
    drawing = ET.parse(tmp_path / "curves.svg")
    assert "with QKClip(100)" in "".join(drawing.getroot().itertext())


def test_runs_that_went_over_the_bar_make_the_exit_code_1(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "ALLOWED", 1e-3)
    assert script.main(["--out", str(tmp_path), "--steps", "2", "--seeds", "5", "--clip"]) == 1
    assert "seed-5-clip: a step was measured at 0.001 times the threshold or more" in capsys.readouterr().err
    assert script.main(["--out", str(tmp_path), "--steps", "2", "--seeds", "5", "--no-clip"]) == 0


def of(script: ModuleType, *losses: float) -> object:
    return script.Run(seed=0, clip=False, losses=list(losses), maxima=[1.0] * len(losses), alarms=[], clipped=0)


def test_a_run_has_diverged_where_its_loss_rose_and_did_not_return(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "SMOOTHED", 2)
    monkeypatch.setattr(script, "RISE", 0.5)
    assert of(script, 9.0, 3.0, 3.0, 3.0, 3.6, 3.6, 4.0).diverged_at() == 5
    assert of(script, 3.0, 3.0, 3.2, 3.2, 3.4, 3.4).diverged_at() is None
    assert of(script, 3.0, 3.0, 4.0, 4.0, 3.0, 3.0).diverged_at() is None, "it returned"
    assert of(script, 3.0, 3.0, 4.0, 4.0, 3.0, 3.0, math.nan, math.nan).diverged_at() == 6
    assert of(script, 3.0, 3.0, 2.0, 2.0, 4.0).lowest() == (3, 2.0)
    assert of(script, 3.0).diverged_at() is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "0"], "argument --steps, --batch: got 0, 40; expected numbers from 1"),
        (["--write", "--steps", "5"], "--write wants the whole: no other option but --out"),
        (["--write", "--no-clip"], "--write wants the whole: no other option but --out"),
    ],
)
def test_wrong_options_are_refused(
    script: ModuleType, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        script.main(["--out", "anywhere", *arguments])
    assert said in capsys.readouterr().err


def test_the_table_goes_between_the_comments_of_the_document(script: ModuleType, tmp_path: Path) -> None:
    before, after = script.around_markers(script.DOCUMENT)
    assert before.endswith("<!-- examples/diverging.py: begin, written by --write -->\n")
    assert after.startswith("<!-- examples/diverging.py: end -->\n")
    bare = tmp_path / "bare.md"
    bare.write_text("nothing", "utf-8")
    with pytest.raises(SystemExit, match=re.escape(f"{bare}: the comments 'examples/diverging.py: begin'")):
        script.around_markers(bare)
