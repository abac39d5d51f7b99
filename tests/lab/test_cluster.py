"""A sweep that Ray deals out comes to the files that a sweep without it comes to; what goes wrong there is one line."""

import sys
from pathlib import Path

import pytest

from attemper.cli import main
from attemper.errors import LoadError
from attemper.lab import sweep as sweeps
from attemper.lab.cluster import train_there
from attemper.lab.identity import run_id
from attemper.lab.store.files import RunFiles
from attemper.lab.sweep import Sweep
from tests.lab_runs import Task, files_of, own_text, tiny

RUNS = tuple(tiny(seed, steps=2) for seed in (0, 1))


def begun(folder: Path) -> Path:
    sweeps.begin(folder, Sweep("two seeds", "", "a command", RUNS))
    return folder


def test_on_a_ray_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install 'attemper[ray]'")
    config = tmp_path / "two.toml"
    config.write_text(
        "seeds = [0, 1]\nsteps = 2\nbatch = 3\nevaluate_every = 4\nlog_every = 2\n"
        "[task]\nlength = 13\n[model]\nlayers = 2\nheads = 3\nhead_dim = 6\nwidth = 10\n"
    )
    folder = tmp_path / "dealt out"
    command = ["lab", "run", str(config), "--out", str(folder), "--ray", "local"]
    assert main(command) == 0
    told = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[0] for line in told[:2]] == ["run 1 of 2", "run 2 of 2"]
    assert told[-1].startswith(f"{folder}: 2 runs, 2 of them trained now; ")
    sweeps.run(begun(tmp_path / "alone"))
    assert files_of(folder) == files_of(tmp_path / "alone")
    assert main(command) == 0  # of no run that is over a cluster is asked
    assert f"{folder}: 2 runs, 0 of them trained now; " in capsys.readouterr().err
    broken = begun(tmp_path / "broken")
    checkpoint = RunFiles(broken, run_id(RUNS[0])).checkpoint
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_bytes(b"nonsense")
    with pytest.raises(LoadError, match=r"ray: 1 of 2 runs failed, .*checkpoint\.safetensors: .*; the others are kept"):
        sweeps.run(broken, ray="local")
    assert [result.config.seed for result in sweeps.results(broken)] == [1]


def test_an_own_text_is_found_from_where_the_command_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text(own_text("words"))
    config = tiny(task=Task(length=13, path="texts"), steps=1)
    (tmp_path / "of the trial").mkdir()
    monkeypatch.chdir(tmp_path / "of the trial")
    texts = {run_id(config): config.model_dump_json()}
    assert train_there({"run": run_id(config)}, str(tmp_path / "sweep"), texts, str(tmp_path))["loss"] > 0
    assert Path.cwd() == tmp_path / "of the trial"
    assert RunFiles(tmp_path / "sweep", run_id(config)).result() is not None


def test_a_cluster_that_does_not_answer(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install 'attemper[ray]'")
    with pytest.raises(LoadError, match=r"ray: no cluster could be reached at '127\.0\.0\.1:1': ConnectionRefusedError"):
        sweeps.run(begun(tmp_path / "sweep"), ray="127.0.0.1:1")


def test_without_ray_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"^ray is needed to run a sweep on a Ray cluster; .*'attemper\[ray\]'"):
        sweeps.run(begun(tmp_path / "sweep"), ray="local")
