import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from attemper.errors import ArgumentError, LoadError
from attemper.lab import sweep as sweeps
from attemper.lab import training
from attemper.lab.events import Event
from attemper.lab.identity import run_id
from attemper.lab.sweep import Sweep
from attemper.lab.table import TIMES, write_table
from tests.lab_runs import MODEL, TASK, After, Optimiser, Task, die, files_of, own_text, tiny
from tests.running import ROOT

RUNS = tuple(tiny(seed, model=MODEL.model_copy(update={"rule": rule})) for rule in ("none", "inverse_sqrt") for seed in (0, 1))
SWEEP = Sweep("two rules", "", "a command", RUNS)
CHILD = """
import sys
from pathlib import Path
from attemper.lab import sweep, training
if __name__ == "__main__":
    training.SAVE_EVERY = 0.0
    sweep.run(Path(sys.argv[1]), int(sys.argv[2]), lambda event: print(event.id, event.step, flush=True))
"""


def table_of(folder: Path) -> pa.Table:
    return parquet.read_table(folder / "table.parquet").drop_columns(list(TIMES))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweeps") / "whole"
    sweeps.begin(folder, SWEEP)
    events: list[Event] = []
    results = sweeps.run(folder, tell=events.append)
    assert [result.id for result in results] == [run_id(run) for run in RUNS]
    steps = RUNS[0].steps
    assert [(event.id, event.step) for event in events if not event.over] == [
        (run_id(run), step) for run in RUNS for step in range(1, steps + 1)
    ]
    assert [event.id for event in events if event.over] == [run_id(run) for run in RUNS]
    return folder


def test_the_table_has_a_row_a_run(whole: Path) -> None:
    table = parquet.read_table(whole / "table.parquet")
    assert table.column("model.rule").to_pylist() == ["none", "none", "inverse_sqrt", "inverse_sqrt"]
    assert table.column("seed").to_pylist() == [0, 1, 0, 1]
    assert table.column("loss").to_pylist() == [result.loss for result in sweeps.results(whole)]
    assert set(TIMES) <= set(table.column_names)
    assert all(value > 0 for name in ("seconds", "tokens_per_second", "peak_mib") for value in table.column(name).to_pylist())


def test_a_finished_sweep_does_no_work(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training.Trial, "__init__", lambda *_: pytest.fail("trained again"))
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    sweeps.begin(whole, SWEEP)
    assert len(sweeps.run(whole)) == len(RUNS)
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before


@pytest.mark.parametrize("content", [None, b"", b"no table", "half", "two rows"])
def test_a_table_that_is_not_what_the_runs_say_is_written_anew(
    content: bytes | str | None, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(whole, tmp_path / "sweep")
    monkeypatch.setattr(training.Trial, "__init__", lambda *_: pytest.fail("trained again"))
    table, wanted = folder / "table.parquet", (whole / "table.parquet").read_bytes()
    table.unlink()
    if content == "two rows":
        write_table(table, sweeps.results(whole)[:2])
    elif content is not None:
        table.write_bytes(content if isinstance(content, bytes) else wanted[: len(wanted) // 2])
    assert len(sweeps.run(folder)) == len(RUNS)
    assert table.read_bytes() == wanted


def test_processes_train_what_one_trains(whole: Path, tmp_path: Path) -> None:
    sweeps.begin(tmp_path / "sweep", SWEEP)
    events: list[Event] = []
    sweeps.run(tmp_path / "sweep", jobs=2, tell=events.append)
    assert files_of(tmp_path / "sweep") == files_of(whole)
    assert table_of(tmp_path / "sweep").equals(table_of(whole))
    assert sum(event.over for event in events) == len(RUNS)


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_killed_sweep_ends_with_the_same_table(jobs: int, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    sweeps.begin(folder, SWEEP)
    chance = random.Random(jobs)
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, _script(tmp_path), str(folder), str(jobs)],
            stdout=subprocess.PIPE, cwd=ROOT, start_new_session=True,
        )  # fmt: skip
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(chance.uniform(0.0, 0.25))
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
    assert len(sweeps.results(folder)) < len(RUNS)
    sweeps.run(folder)
    assert files_of(folder) == files_of(whole)
    assert table_of(folder).equals(table_of(whole))
    left = {path.name for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")}
    assert left == {path.name for path in whole.rglob("*") if path.is_file()}


def _script(folder: Path) -> str:
    """Processes that are spawned read the main module again, which text behind -c is not."""
    path = folder / "child.py"
    path.write_text(CHILD)
    return str(path)


def test_a_process_that_is_killed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweeps.begin(tmp_path / "sweep", SWEEP)
    monkeypatch.setattr(sweeps, "_train_there", die)
    with pytest.raises(LoadError, match=r"process that trained was killed.*attemper lab resume"):
        sweeps.run(tmp_path / "sweep", jobs=2)


def test_another_sweep_is_not_mixed_in(whole: Path) -> None:
    other = Sweep("other", "", "", RUNS[:2])
    with pytest.raises(ArgumentError, match="which holds another sweep \\(two rules, 4 runs, by: a command\\)"):
        sweeps.begin(whole, other)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear reader")
    with pytest.raises(ArgumentError, match="which holds something else"):
        sweeps.begin(tmp_path, SWEEP)
    with pytest.raises(ArgumentError, match=r"letter\.txt, which holds something else"):
        sweeps.begin(tmp_path / "letter.txt", SWEEP)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]
    with pytest.raises(LoadError, match=r"no sweep\.json is there"):
        sweeps.read(tmp_path)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": MODEL.model_copy(update={"attention": "additive"})}, "model.attention: got 'additive' for the task 'text'"),
        ({"model": MODEL.model_copy(update={"position": "learned"}), "after": After(lengths=(29,))}, "length: got 29 tokens"),
        ({"task": TASK.model_copy(update={"path": "/none"})}, "/none: No such file or directory"),
        ({"task": TASK.model_copy(update={"path": "/dev/zero"})}, "/dev/zero: neither a file nor a folder; expected a text file"),
        ({"task": TASK.model_copy(update={"path": "a\0b"})}, "b: embedded null byte; expected a text file"),
        (
            {"model": MODEL.model_copy(update={"head_dim": (4, 6, 8)}), "optimiser": Optimiser(qk_clip=3.0)},
            "optimiser.qk_clip: got 3 beside model.head_dim = [4, 6, 8]; expected heads of one width, or none",
        ),
        ({"batch": 2**31 - 1}, "in this machine; expected runs that fit: a smaller batch, task.length, "),
        ({"model": MODEL.model_copy(update={"layers": 2**31 - 1})}, "in this machine; expected runs that fit: a smaller batch"),
        ({"model": MODEL.model_copy(update={"heads": 2**31 - 1})}, "in this machine; expected runs that fit: a smaller batch"),
        ({"task": Task(name="recall", symbols=2**31 - 1)}, "in this machine; expected runs that fit: a smaller batch"),
        ({"task": Task(name="reversal", length=2**31 - 1)}, "in this machine; expected runs that fit: a smaller batch"),
    ],
)
def test_an_impossible_run_is_said_before_any_is_trained(fields: dict[str, object], said: str, tmp_path: Path) -> None:
    with pytest.raises((ArgumentError, LoadError), match=re.escape(said)):
        sweeps.begin(tmp_path / "sweep", Sweep("mixed", "", "", (*RUNS, tiny(**fields))))
    assert not (tmp_path / "sweep").exists()


def test_an_own_text_that_was_edited_is_refused(tmp_path: Path) -> None:
    text, folder = tmp_path / "own.txt", tmp_path / "sweep"
    text.write_text(own_text("some words"))
    asked = Sweep("own", "", "", tuple(tiny(seed, task=TASK.model_copy(update={"path": str(text)})) for seed in (0, 1)))
    sweeps.begin(folder, asked)
    sweeps.train_one(folder, asked.runs[0], lambda _event: None)
    text.write_text(own_text("other words"))
    for again in (lambda: sweeps.run(folder), lambda: sweeps.begin(folder, asked)):
        with pytest.raises(LoadError, match=r"its runs learn from .*own\.txt, sha256 .*, and now there is"):
            again()
    text.write_text(own_text("some words"))
    sweeps.begin(folder, asked)
    assert len(sweeps.run(folder)) == 2


BROKEN: list[dict[str, object]] = [
    {"name": 3},
    {"name": "../elsewhere"},  # `report --write-docs` makes a folder of that name
    {"name": ".."},
    {"effort": ["quick"]},
    {"command": None},
    {"runs": []},
    {"data": ["of one run of four"]},
]


@pytest.mark.parametrize("change", [{"format": 9}, {"runs": [{"steps": 0}]}, {"runs": None}, {"more": 1}, *BROKEN])
def test_a_broken_sweep_is_said(change: dict[str, object], tmp_path: Path) -> None:
    sweeps.begin(tmp_path, SWEEP)
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(LoadError, match=r"sweep\.json: .*(expected|another version)"):
        sweeps.read(tmp_path)


def test_a_sweep_that_nests_without_end_is_said(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text("[" * 100_000)
    with pytest.raises(LoadError, match=r"sweep\.json: .*expected what `attemper lab run` wrote"):
        sweeps.read(tmp_path)
