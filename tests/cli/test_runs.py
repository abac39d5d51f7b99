"""`attemper top` and `attemper report`: a run that is over, one that goes on, and none."""

import dataclasses
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from attemper.cli import main
from attemper.cli.top import refreshed
from attemper.monitor import RunInfo
from attemper.monitor.runs import read_run
from attemper.monitor.trackers.json_lines import JSONLines
from attemper.report.runs import RunView
from tests.monitor.runs import INFO, alarm
from tests.monitor.series import layer, record
from tests.running import ROOT, hear_ctrl_c

Capture = pytest.CaptureFixture[str]


def logged(path: Path, steps: range, *, resume: bool = False, info: RunInfo = INFO, loss: float = 2.0) -> None:
    tracker = JSONLines(path, resume=resume)
    tracker.begin(info)
    for step in steps:
        made = record(step, layer((3.0, 100.0 + step)), layer((7.0, 5.0), name="layers.1.attention"), loss=loss)
        tracker.log(dataclasses.replace(made, alarms=(alarm(step),) if step == 1 else ()))
    tracker.close()


def test_a_run_that_another_took_the_place_of_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    logged(path, range(5))
    shown = RunView.of(read_run(path))
    path.unlink()
    logged(path, range(8), info=dataclasses.replace(INFO, started=INFO.started + 7), loss=3.0)
    later = refreshed(str(path), shown)
    assert later.steps == tuple(range(8))
    assert later.scalars["loss"].tolist() == [3.0] * 8


@pytest.fixture
def run(tmp_path: Path) -> Path:
    logged(tmp_path / "run.jsonl", range(5))
    return tmp_path / "run.jsonl"


@pytest.mark.parametrize("words", [["top"], ["top", "--once"], ["report"]])
def test_a_table_where_there_is_no_terminal(capsys: Capture, run: Path, words: list[str]) -> None:
    assert main([*words, str(run)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "step: 4 (5 logged steps since 0), loss 2" in out
    assert "error ATT502 step 1: layers.0.attention: head 1 is large." in out
    assert out.endswith("1 error, 0 warnings in 1 alarm. Largest |scale·q·k| of them all 104.\n")


@pytest.mark.parametrize("verb", ["top", "report"])
def test_no_such_run(capsys: Capture, tmp_path: Path, verb: str) -> None:
    assert main([verb, str(tmp_path / "none")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "none: nothing is there; expected the file of JSONLines or the folder of Parquet" in err
    (tmp_path / "other.txt").write_text("hello\n")
    assert main([verb, str(tmp_path / "other.txt")]) == 2
    assert "a run that JSONLines wrote" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["top", "report"])
def test_layers_are_chosen_by_their_names(capsys: Capture, run: Path, verb: str) -> None:
    assert main([verb, str(run), "--layers", "*.1.*"]) == 0
    out = capsys.readouterr().out
    assert "1 attention layer, 2 heads, 5 logged steps: 0 errors" in out
    assert main([verb, str(run), "--layers", "x"]) == 2
    assert "layers: got 'x'; expected a glob that fits one of layers.0.attention, layers.1.attention" in capsys.readouterr().err


def test_the_interval_has_bounds(capsys: Capture, run: Path) -> None:
    assert main(["top", str(run), "--interval", "0"]) == 2
    assert "--interval: got 0.0; expected seconds, from 0.05 to 3600" in capsys.readouterr().err


def test_report_as_json(capsys: Capture, run: Path) -> None:
    assert main(["report", str(run), "--output-format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["layers"][0]["figures"]["max_scaled_product"] == [3.0, 104.0]
    assert data["alarms"][0]["code"] == "ATT502"


def test_report_as_a_page(capsys: Capture, run: Path, tmp_path: Path) -> None:
    assert main(["report", str(run), "--html", str(tmp_path / "run.html")]) == 0
    assert "logged steps" in capsys.readouterr().out
    page = (tmp_path / "run.html").read_text("utf-8")
    assert "1 alarm in 5 logged steps, 1 error." in page
    assert "logit-above-1e3-in-training" in page
    assert main(["report", str(run), "--html", str(tmp_path / "no" / "run.html")]) == 2
    assert "html: got" in capsys.readouterr().err


def test_a_page_never_takes_the_place_of_its_run(capsys: Capture, run: Path, tmp_path: Path) -> None:
    before = run.read_bytes()
    (tmp_path / "link").symlink_to(run)
    for page in (run, tmp_path / "link"):
        assert main(["report", str(run), "--html", str(page)]) == 2
        assert f"--html: got {page}; expected another file than RUN {run}, which it would overwrite" in capsys.readouterr().err
    assert run.read_bytes() == before
    folder = tmp_path / "folder"  # what is in it is not looked at
    (folder / "_steps").mkdir(parents=True)
    for page in (folder / "_run.json", folder / "_steps" / "new.html"):
        assert main(["report", str(folder), "--html", str(page)]) == 2
        assert f"--html: got {page}; expected a file outside of {folder}, the folder of the run" in capsys.readouterr().err


class Live:
    """`attemper top` on a terminal of its own."""

    def __init__(self, *words: str) -> None:
        self.ours, theirs = pty.openpty()
        self.text = ""
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "30", "PYTHONWARNINGS": "error"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "attemper", "top", *words],
            cwd=ROOT,
            env=environment,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            preexec_fn=hear_ctrl_c,  # noqa: PLW1509 - no thread of these tests runs meanwhile
        )
        os.close(theirs)

    def wait(self, wanted: Callable[[str], bool], seconds: float = 60.0) -> None:
        """Read until it shows what is wanted."""
        end = time.monotonic() + seconds
        while not wanted(self.text):
            assert time.monotonic() < end, f"not shown: {self.text[-2000:]}"
            if select.select([self.ours], [], [], 0.2)[0]:
                try:
                    self.text += os.read(self.ours, 65536).decode(errors="replace")
                except OSError:  # it has ended
                    assert wanted(self.text), self.text[-2000:]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.ours)


@pytest.mark.slow
def test_it_follows_a_run_until_it_is_interrupted(run: Path) -> None:
    live = Live(str(run), "--interval", "0.05")
    try:
        live.wait(lambda text: "4 (5 logged steps since 0)" in text and "Ctrl-C ends this" in text)
        logged(run, range(5, 8), resume=True)
        live.wait(lambda text: "7 (8 logged steps since 0)" in text)
        logged(run, range(6, 7), resume=True)  # training went back to a checkpoint
        live.wait(lambda text: "6 (7 logged steps since 0)" in text and "went back 1 time" in text)
        live.process.send_signal(signal.SIGINT)
        live.wait(lambda text: "\x1b[?1049l" in text)  # the screen from before is back
        assert live.process.wait(20) == 130
    finally:
        live.close()


@pytest.mark.slow
def test_it_ends_with_one_line_when_the_run_is_gone(run: Path) -> None:
    live = Live(str(run), "--interval", "0.05")
    try:
        live.wait(lambda text: "4 (5 logged steps since 0)" in text)
        run.unlink()
        live.wait(lambda text: "\x1b[?1049l" in text and text.endswith("\n"))
        assert live.process.wait(20) == 2
        _, said = live.text.split("\x1b[?1049l")
        assert f"attemper: {run}: nothing is there; expected the file of JSONLines" in said
        assert "Traceback" not in live.text
        assert said.count("\n") == 1
    finally:
        live.close()
