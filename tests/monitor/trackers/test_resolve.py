"""Trackers are found by what a person writes, and one that fails does not take training with it."""

import logging
import tomllib
from importlib.metadata import EntryPoint, distribution, entry_points
from pathlib import Path

import pytest

from attemper.errors import ArgumentError
from attemper.monitor import RunInfo, StepRecord
from attemper.monitor.runs import read_run
from attemper.monitor.trackers import JSONLines, Live, Parquet, Trackio, WandB, resolve
from attemper.monitor.trackers.guard import begin_all
from tests.monitored import INFO, record_of
from tests.running import ROOT

GROUP = "attemper.trackers"
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"][GROUP]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this checkout were installed now, and another package beside it."""
    points = [
        EntryPoint(name, value, GROUP)
        for name, value in {**DECLARED, "other": "tests.monitor.trackers.test_resolve:Other"}.items()
    ]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [point for point in points if point.group == group])


class Other:
    """What another package would bring."""

    def __init__(self, fails_in: str = "") -> None:
        self.fails_in, self.seen = fails_in, []

    def begin(self, run: RunInfo) -> None:
        self._do("begin")

    def log(self, record: StepRecord) -> None:
        self._do(f"log {record.step}")

    def close(self) -> None:
        self._do("close")

    def _do(self, what: str) -> None:
        self.seen.append(what)
        if what == self.fails_in:
            raise OSError(f"the disk is full in {what}")


def test_the_package_declares_its_trackers() -> None:
    declared = {point.name: point.value for point in entry_points(group=GROUP)}
    assert declared.items() >= DECLARED.items(), "install it again: make clean, then make test"


@pytest.mark.parametrize("name", DECLARED)
def test_each_name_makes_its_tracker(name: str, tmp_path: Path) -> None:
    where = "" if name in ("live", "wandb", "trackio") else f":{tmp_path / 'run'}"
    (tracker,) = resolve(f"{name}{where}")
    assert type(tracker.tracker).__name__ == DECLARED[name].rpartition(":")[2]


def test_the_place_of_a_dashboard_is_its_project() -> None:
    wandb, trackio, plain = (guarded.tracker for guarded in resolve(["wandb:mine", "trackio:mine", "trackio"]))
    assert isinstance(wandb, WandB)
    assert isinstance(trackio, Trackio)
    assert isinstance(plain, Trackio)
    assert (wandb._given, wandb._init) == (None, {"project": "mine"})
    assert (trackio._given, trackio._init["project"], plain._init["project"]) == (None, "mine", "attemper")


def test_strings_instances_and_functions_together(tmp_path: Path) -> None:
    seen: list[StepRecord] = []
    mine = Other()
    trackers = resolve([f"jsonl:{tmp_path / 'a:b.jsonl'}", Parquet(tmp_path / "p"), mine, seen.append, "other:nowhere"])
    assert [tracker.name for tracker in trackers] == ["JSONLines", "Parquet", "Other", "list.append", "Other"]
    begin_all(trackers, INFO)
    for tracker in trackers:
        tracker.log(record_of(3))
        tracker.close()
    assert [record.step for record in seen] == [3]
    assert mine.seen == ["begin", "log 3", "close"]
    assert list(read_run(tmp_path / "a:b.jsonl").scalars) == list(read_run(tmp_path / "p").scalars) == [3]


def test_print_is_a_tracker(capsys: pytest.CaptureFixture[str]) -> None:
    (tracker,) = resolve(print)
    tracker.log(record_of(0))
    line = capsys.readouterr().out
    assert line.startswith("step 0, loss 3, largest max_logit ")
    assert line.endswith("ATT501 at blocks.0.attn, ATT503 at blocks.1.attn\n")


def test_trackers_that_are_there_are_not_wrapped_again() -> None:
    trackers = resolve([Live()])
    assert resolve(trackers) == trackers


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("paquet:runs/x", "'paquet:runs/x'; expected one of jsonl, live, mlflow, other, parquet, tensorboard, trackio, wandb"),
        ("parquet", "'parquet'; expected \"parquet:FOLDER\", where it is to write"),
        ("jsonl:", "'jsonl:'; expected \"jsonl:PATH\""),
        ("live:7", "'live:7'; expected \"live\" alone: it writes to no place"),
        ([Parquet], r"the class Parquet; expected an instance of it: Parquet\(…\)"),
        (3, "3; expected trackers, functions, or strings"),
        ([3], "3; expected a tracker, a function of one record, or a string"),
    ],
)
def test_what_is_no_tracker_is_refused(given: object, words: str) -> None:
    with pytest.raises(ArgumentError, match=f"trackers: got {words}"):
        resolve(given)  # pyrefly: ignore


def test_a_tracker_that_fails_is_said_once_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Other("log 1"), Other()
    trackers = resolve([bad, good])
    with caplog.at_level(logging.WARNING, logger="attemper"):
        begin_all(trackers, INFO)
        for step in range(4):
            for tracker in trackers:
                tracker.log(record_of(step))
        for tracker in trackers:
            tracker.close()
    assert bad.seen == ["begin", "log 0", "log 1", "close"]
    assert good.seen == ["begin", "log 0", "log 1", "log 2", "log 3", "close"]
    assert [str(tracker.fault) for tracker in trackers] == ["the disk is full in log 1", "None"]
    (said,) = caplog.records
    assert said.message == "the tracker Other failed at step 1, and gets nothing more of this run: the disk is full in log 1"
    assert said.exc_info is not None


def test_a_fault_in_closing_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    (tracker,) = resolve(Other("close"))
    tracker.close()
    assert "Other could not be closed: the disk is full in close" in caplog.text
    assert isinstance(tracker.fault, OSError)


def test_a_fault_in_the_beginning_is_raised_and_the_others_are_closed(tmp_path: Path) -> None:
    first, last = Other(), Other()
    (tmp_path / "there").write_text("notes of mine")
    trackers = resolve([first, JSONLines(tmp_path / "there"), last])
    with pytest.raises(ArgumentError, match="there, which is there already"):
        begin_all(trackers, INFO)
    assert (first.seen, last.seen) == (["begin", "close"], [])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("not_there_at_all:X", "ModuleNotFoundError: No module named 'not_there_at_all'"),
        ("json:Nope", "AttributeError: module 'json' has no attribute 'Nope'"),
        ("with_a_fault:X", "SyntaxError: .*invalid syntax"),
        ("builtins:dict", "ValueError: no signature found for builtin type"),
        ("pathlib:PurePath", "it makes a PurePosixPath, which lacks begin, log or close"),
        ("tests.monitor.trackers.test_resolve:fails", "RuntimeError: no place x"),
    ],
)
def test_a_broken_tracker_of_another_package_is_named(
    value: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "with_a_fault.py").write_text("class = 3\n")
    about = tmp_path / "third-1.5.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: third\nVersion: 1.5\n")
    (about / "entry_points.txt").write_text(f"[{GROUP}]\nbad = {value}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = distribution("third").entry_points
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: found)
    with pytest.raises(ArgumentError, match=f"'bad:x', which the package third 1.5 brings as {value} and which failed: {words}"):
        resolve("bad:x")


def fails(where: str) -> Other:
    raise RuntimeError(f"no place {where}")


def test_no_other_package_takes_a_name_of_attemper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    points = [EntryPoint("jsonl", value, GROUP) for value in (DECLARED["jsonl"], "tests.monitor.trackers.test_resolve:Other")]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points)
    (tracker,) = resolve(f"jsonl:{tmp_path / 'run'}")
    assert isinstance(tracker.tracker, JSONLines)
