"""A run has one writer; when that is killed, the next can go on at once, even where processes that it forked live on."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attemper.errors import ArgumentError
from attemper.monitor.runs import read_run
from attemper.monitor.trackers import JSONLines, Parquet
from tests.monitored import INFO, record_of

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked, and locks are those of fcntl")
BOTH = pytest.mark.parametrize("tracker", [JSONLines, Parquet])
Make = Callable[..., Any]


def writer(tracker: Make, path: Path) -> tuple[int, int]:
    """Processes that write a step and wait: (the one that writes, one that it forked)."""
    reading, writing = os.pipe()
    first = os.fork()
    if first == 0:
        try:
            written = tracker(path, resume=True)
            written.begin(INFO)
            written.log(record_of(0))
            second = os.fork()
            if second:
                os.write(writing, f"{second}\n".encode())
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as stream:
        second = int(stream.readline())
    return first, second


@BOTH
def test_a_second_process_is_refused_until_the_first_is_killed(tracker: Make, tmp_path: Path) -> None:
    first, second = writer(tracker, tmp_path / "run")
    try:
        for resume in (True, False):
            with pytest.raises(ArgumentError, match="run, which another tracker or process is writing; expected a run whose"):
                tracker(tmp_path / "run", resume=resume).begin(INFO)
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        os.kill(second, 0)  # which still lives
        again = tracker(tmp_path / "run", resume=True)
        again.begin(INFO)
        again.log(record_of(1))
        again.close()
    finally:
        os.kill(second, signal.SIGKILL)
    assert list(read_run(tmp_path / "run").scalars) == [0, 1]


@BOTH
def test_two_trackers_of_one_process_are_told_and_closing_lets_go(tracker: Make, tmp_path: Path) -> None:
    first, second = tracker(tmp_path / "run"), tracker(tmp_path / "run")
    first.begin(INFO)
    with pytest.raises(ArgumentError, match="run, which another tracker or process is writing"):
        second.begin(INFO)
    first.close()
    second.begin(INFO)
    second.log(record_of(0))
    second.close()
    with pytest.raises(ArgumentError, match="already"):
        tracker(tmp_path / "run").begin(INFO)
    assert list(read_run(tmp_path / "run").scalars) == [0]


@BOTH
def test_a_tracker_that_is_begun_twice_is_told_and_keeps_its_run(tracker: Make, tmp_path: Path) -> None:
    twice = tracker(tmp_path / "run")
    twice.begin(INFO)
    with pytest.raises(ArgumentError, match="run, which another tracker or process is writing"):
        twice.begin(INFO)
    twice.log(record_of(0))
    with pytest.raises(ArgumentError, match="run, which another tracker or process is writing"):
        tracker(tmp_path / "run", resume=True).begin(INFO)
    twice.close()


def test_what_is_no_file_is_not_locked() -> None:
    trackers = [JSONLines(os.devnull), JSONLines(os.devnull)]
    for tracker in trackers:
        tracker.begin(INFO)
        tracker.log(record_of(0))
    for tracker in trackers:
        tracker.close()
