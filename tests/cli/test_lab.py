"""`attemper lab`: runs, goes on, lists, reports, compares; what is wrong ends in one line."""

import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attemper.cli import main
from attemper.lab.presets import NAMES
from attemper.lab.store.files import RunFiles
from attemper.lab.store.state import State, save
from attemper.lab.sweep import results
from tests.running import ROOT, hear_ctrl_c

Capture = pytest.CaptureFixture[str]
TOML = """
seeds = [0, 1]
steps = 7
batch = 2
evaluate_every = 4
[vary]
"model.rule" = ["none", "inverse_sqrt"]
[task]
length = 11
[model]
layers = 1
head_dim = 6
width = 10
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lab") / "mine.toml"
    path.write_text(TOML)
    return path


@pytest.fixture(scope="module")
def sweep(config: Path) -> Path:
    folder = config.parent / "sweep"
    assert main(["lab", "run", str(config), "--out", str(folder)]) == 0
    return folder


def test_a_sweep_runs_and_runs_again_without_work(config: Path, sweep: Path, capsys: Capture) -> None:
    assert main(["lab", "run", str(config), "--out", str(sweep)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("What do the runs of mine come to?\n\nThe lowest mean held-out loss is ")
    assert err == f"{sweep}: 4 runs, 0 of them trained now; page in {sweep}/page.html\n"
    page = (sweep / "page.html").read_text()
    assert "<figcaption>Held-out loss</figcaption>" in page
    assert "rule = inverse_sqrt" in page  # in the legend


def test_progress_without_a_terminal_is_a_line_a_run(config: Path, tmp_path: Path, capsys: Capture) -> None:
    assert (
        main(["lab", "run", str(config), "--out", str(tmp_path / "s"), "--seeds", "1", "--html", str(tmp_path / "p.html")]) == 0
    )
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines[:-1]] == ["run 1 of 2", "run 2 of 2"]
    assert lines[-1].endswith(f"2 of them trained now; page in {tmp_path}/p.html")
    assert (tmp_path / "p.html").exists()


def test_list_tells_the_presets_and_the_runs(sweep: Path, capsys: Capture) -> None:
    assert main(["lab", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == list(NAMES)
    assert main(["lab", "list", str(sweep)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert all(": done, loss " in line for line in lines)
    assert [line.split(", ")[1] for line in lines] == ["none", "none", "inverse_sqrt", "inverse_sqrt"]


def test_the_list_tells_runs_apart_by_what_differs(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "rates.toml"
    file.write_text(
        'steps = 2\nbatch = 2\n[vary]\n"optimiser.learning_rate" = [1e-3, 1e20]\n[optimiser]\nname = "sgd"\nwarmup = 0\n'
        '[task]\nname = "recall"\nlength = 9\n[model]\nlayers = 1\nwidth = 8\nhead_dim = 4\n'
    )
    assert main(["lab", "run", str(file), "--out", str(tmp_path / "sweep"), "--jobs", "1"]) == 0
    assert re.search(r"run 2 of 2: \w+, diverged\n", capsys.readouterr().err)
    assert main(["lab", "list", str(tmp_path / "sweep")]) == 0
    first, second = (line.partition("  ")[2] for line in capsys.readouterr().out.splitlines())
    assert first.startswith("recall, inverse_sqrt, d_k 4, optimiser.learning_rate 0.001, seed 0: done, loss ")
    assert second == "recall, inverse_sqrt, d_k 4, optimiser.learning_rate 1e+20, seed 0: diverged at step 1"


def test_the_list_says_how_far_a_run_is(sweep: Path, tmp_path: Path, capsys: Capture) -> None:
    half = shutil.copytree(sweep, tmp_path / "half")
    for place, result in enumerate(results(half)):
        files = RunFiles(half, result.id)
        if place < 3:
            (files.folder / "result.json").unlink()
        if place == 1:
            save(files.checkpoint, State(5, {}))
        if place == 2:
            files.checkpoint.write_bytes(b"no checkpoint")
    assert main(["lab", "list", str(half)]) == 0
    told = [line.rpartition(": ")[2] for line in capsys.readouterr().out.splitlines()]
    assert told[:3] == ["to do", "stands at step 5 of 7", "stands at an unknown step of 7"]
    assert told[3].startswith("done, loss ")


def test_report_has_the_tables(sweep: Path, capsys: Capture) -> None:
    assert main(["lab", "report", str(sweep)]) == 0
    out = capsys.readouterr().out
    losses = [result.loss for result in results(sweep)]
    assert f"none          {sum(losses[:2]) / 2:.3f} ± " in out


def test_what_is_made_of_the_runs_is_made_anew(sweep: Path, tmp_path: Path, capsys: Capture) -> None:
    folder = shutil.copytree(sweep, tmp_path / "sweep")
    wanted = (sweep / "table.parquet").read_bytes()
    (folder / "page.html").write_text("torn")
    (folder / "table.parquet").write_bytes(b"torn")
    assert main(["lab", "report", str(folder), "--write-docs", str(tmp_path / "docs")]) == 0
    assert (tmp_path / "docs" / "mine" / "table.parquet").read_bytes() == wanted
    capsys.readouterr()
    assert main(["lab", "resume", str(folder)]) == 0
    assert "4 runs, 0 of them trained now; page in " in capsys.readouterr().err
    assert (folder / "table.parquet").read_bytes() == wanted
    assert (folder / "page.html").read_text("utf-8").startswith("<!doctype html>")


def test_report_writes_what_a_document_needs(sweep: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(["lab", "report", str(sweep), "--write-docs", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    folder = tmp_path / "mine"
    assert sorted(path.name for path in folder.iterdir()) == ["answer.txt", "page.html", "table.parquet"]
    assert (folder / "table.parquet").read_bytes() == (sweep / "table.parquet").read_bytes()
    text = (folder / "answer.txt").read_text("utf-8")
    assert text.startswith(out)
    assert "Made by `attemper lab run " in text
    assert ": 4 runs, " in text
    (tmp_path / "file").write_text("")
    assert main(["lab", "report", str(sweep), "--write-docs", str(tmp_path / "file")]) == 2
    assert "--write-docs" in capsys.readouterr().err


def test_compare_names_what_tells_two_sweeps_apart(config: Path, sweep: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(["lab", "run", str(config), "--out", str(tmp_path / "wide"), "--set", "model.head_dim=[4, 8]"]) == 0
    capsys.readouterr()
    assert main(["lab", "compare", str(sweep), str(tmp_path / "wide")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("What tells them apart: model.head_dim\n")
    assert "model.rule = none" in out
    assert main(["lab", "compare", str(sweep), str(sweep)]) == 0
    assert "nothing: they are one sweep" in capsys.readouterr().out


def test_a_preset_that_was_changed_keeps_its_effort_and_says_so(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    efforts = []
    monkeypatch.setattr("attemper.cli.lab.running.write_page", lambda *_, **__: "no page")
    monkeypatch.setattr("attemper.lab.presets.entropy_bound.measured_rows", lambda _run, examples: efforts.append(examples) or [])
    small = [part for each in ("steps=1", "model.layers=1", "task.length=31") for part in ("--set", each)]
    command = ["lab", "run", "entropy-bound", *small, "--seeds", "1", "--jobs", "1"]
    for quick in ([], ["--quick"]):
        assert main([*command, *quick, "--out", str(tmp_path / f"sweep{len(quick)}")]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        told = " ".join(["attemper lab run entropy-bound", *quick, *small, "--seeds 1"])
        assert f"The runs are not the preset's own but those of `{told}`;" in shown
    assert efforts == [128] * 3 + [16] * 3


def test_a_file_that_is_called_as_a_preset_is_a_file(config: Path, tmp_path: Path, capsys: Capture) -> None:
    named = tmp_path / "convergence.toml"
    named.write_text(config.read_text())
    assert main(["lab", "run", str(named), "--out", str(tmp_path / "sweep"), "--set", "steps=1", "--jobs", "1"]) == 0
    assert capsys.readouterr().out.startswith("What do the runs of convergence come to?")


def test_runs_that_a_setting_makes_one_are_told(config: Path, tmp_path: Path, capsys: Capture) -> None:
    few = ["--set", "steps=1", "--jobs", "1"]
    assert main(["lab", "run", str(config), "--out", str(tmp_path / "s"), "--set", "seed=1", *few]) == 0
    told, *_ = capsys.readouterr().err.splitlines()
    assert told == "--set seed=1 steps=1: of 4 runs 2 remain, as the others differ in that alone"
    assert [run.config.seed for run in results(tmp_path / "s")] == [1, 1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "convergense"], "convergense: neither a preset nor a file; expected one of convergence, "),
        (["run", "CONFIG", "--quick"], "--quick: got beside a file; expected a preset"),
        (["run", "CONFIG", "--set", "model.init=x"], "model.init: got \"x\"; expected 'unit', "),
        (
            ["run", "CONFIG", "--set", "model.rule=none"],
            '--set: got model.rule, of which the file has 2 values ("none", "inverse_sqrt"); expected a field that is the same',
        ),
        (["run", "CONFIG", "--set", "rule=none"], 'rule: got "none"; expected a field that there is: task, '),
        (
            ["run", "CONFIG", "--out", "SWEEP", "--set", "steps=8"],
            "which holds another sweep (mine, 4 runs, by: attemper lab ",
        ),
        (
            ["run", "convergence", "--set", "steps=2", "--set", "model.rule=none"],
            "--set: got model.rule for the preset convergence; expected a field on which its answer does not rest, so none of ",
        ),
        (["run", "CONFIG", "--seeds", "3", "--set", "seed=1"], "--seeds: got 3 beside --set seed=1; expected one of the two"),
        (["run", "CONFIG", "--out", "CONFIG"], "mine.toml, which holds something else; expected a new folder"),
        (["run", "CONFIG", "--out", "/proc/nothing"], "/proc/nothing (No such file or directory); expected a folder that can be"),
        (["run", "examples", "--set", "model.width=64"], "model.width: got 64; expected 128, as the example models have it"),
        (
            ["run", "CONFIG", "--out", "NEW", "--html", "/proc/nothing/a.html"],
            "in a folder that exists; create /proc/nothing",
        ),
        (["run", "CONFIG", "--out", "NEW", "--ray", "local", "--jobs", "2"], "--jobs: got 2; expected nothing beside --ray"),
        (["run", "CONFIG", "--seeds", "0"], "Invalid value for '--seeds'"),
        (["run", "CONFIG", "--seeds", "1000000000"], "Invalid value for '--seeds'"),
        (["run", "CONFIG", "--jobs", "0"], "Invalid value for '--jobs'"),
        (["run", "CONFIG", "--set", "threads=30000"], "threads: got 30000; expected less than or equal to 1024"),
        (["resume", "FOLDER"], "no sweep.json is there; expected a folder that `attemper lab run --out` made"),
        (["list", "FOLDER"], "no sweep.json is there"),
        (["report", "FOLDER"], "no sweep.json is there"),
        (["compare", "SWEEP", "FOLDER"], "no sweep.json is there"),
        (["run"], "Missing argument"),
    ],
)
def test_what_is_wrong_is_one_line(
    words: list[str], said: str, config: Path, sweep: Path, tmp_path: Path, capsys: Capture
) -> None:
    places = {"CONFIG": str(config), "SWEEP": str(sweep), "FOLDER": str(tmp_path), "NEW": str(tmp_path / "new")}
    assert main(["lab", *(places.get(word, word) for word in words)]) == 2
    assert not (tmp_path / "new").exists()
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err.replace("\n", " ")
    assert "Traceback" not in err


def test_a_sweep_that_is_half_over_is_compared_by_what_is_there(sweep: Path, tmp_path: Path, capsys: Capture) -> None:
    half = shutil.copytree(sweep, tmp_path / "half")
    for result in results(half)[::2]:
        (half / "runs" / result.id / "result.json").unlink()
    assert main(["lab", "compare", str(sweep), str(half)]) == 0
    out = capsys.readouterr().out
    assert "nan" not in out
    assert [line.split()[-2:] for line in out.splitlines() if line.startswith("model.rule")] == [["1", "0"]] * 2
    for result in results(half):  # a whole arm is missing
        if result.config.model.rule == "none":
            (half / "runs" / result.id / "result.json").unlink()
    for pair in ((sweep, half), (half, sweep)):
        assert main(["lab", "compare", *map(str, pair)]) == 0
        out = capsys.readouterr().out
        assert out.startswith("What tells them apart: nothing")
        assert [line.split()[:3] for line in out.splitlines() if line.startswith("model.rule")] == [
            ["model.rule", "=", "inverse_sqrt"]
        ]
    assert main(["lab", "report", str(half)]) == 2
    assert "3 of 4 runs are not over; `attemper lab resume" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_takes_no_answer_with_it(sweep: Path, tmp_path: Path, capsys: Capture) -> None:
    folder = shutil.copytree(sweep, tmp_path / "sweep", ignore=shutil.ignore_patterns("page.html"))
    (folder / "page.html").mkdir()
    assert main(["lab", "resume", str(folder)]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("What do the runs of mine come to?")
    assert err == f"attemper: --html: got a folder, {folder}/page.html; expected the name of a file\n"


@pytest.mark.slow
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_ctrl_c_ends_in_one_line_and_the_sweep_goes_on(
    jobs: str, config: Path, sweep: Path, tmp_path: Path, capsys: Capture
) -> None:
    folder = tmp_path / "sweep"
    long = ["--set", "steps=4000", "--set", "evaluate_every=4000"]
    child = subprocess.Popen(
        [sys.executable, "-m", "attemper", "lab", "run", str(config), "--out", str(folder), "--jobs", jobs, *long],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, preexec_fn=hear_ctrl_c, start_new_session=True,  # noqa: PLW1509 - no thread of these tests runs meanwhile
    )  # fmt: skip
    until = time.monotonic() + 60
    while not list(folder.glob("runs/*/config.json")) and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(4)  # until it trains: before, it imports for a second or two
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err) == (130, "", "attemper: interrupted\n")
    assert main(["lab", "list", str(folder)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert main(["lab", "report", str(folder)]) == 2
    assert "`attemper lab resume " in capsys.readouterr().err
