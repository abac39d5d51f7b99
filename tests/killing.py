"""Kills processes that log a run, with SIGKILL, and looks at what they left: `python -m tests.killing TRACKER FOLDER`.

First before each single thing that a process asks of the file system, one process a thing, and each run is then gone on with;
then at random moments, each process going on with the run of the one before, while this one reads it.
"""

import itertools
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet

from attemper.errors import LoadError
from attemper.monitor.runs import read_run
from attemper.monitor.trackers import JSONLines, Parquet, json_lines, parquet
from tests.monitored import INFO, expected, record_of, same

RECORDS = [record_of(step) for step in range(40)]
EXPECTED = expected(RECORDS)
HEADS = len(EXPECTED["step"]) // len(RECORDS)
TRACKERS: dict[str, Callable[..., JSONLines | Parquet]] = {"JSONLines": JSONLines, "Parquet": Parquet}
_KEYS = ("step", "layer", "call", "head")


def die_before(count: int, place: Path) -> None:
    """Let this process be killed before the `count`-th thing that it does to files below `place`."""
    done = itertools.count()

    def act() -> None:
        if next(done) == count:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in {"open", "os.rename", "os.mkdir", "os.remove"} and str(arguments[0]).startswith(str(place)):
            act()

    sys.addaudithook(hook)
    os.fsync = lambda _handle: act()


def log_in_child(name: str, path: Path, first: int, end: int, dies_before: int | None = None) -> tuple[int, int]:
    """A process that goes on with the run: (its id, where it writes a byte when begin returns and one when each log does)."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if dies_before is not None:
                die_before(dies_before, path)
            tracker = TRACKERS[name](path, resume=True)
            tracker.begin(INFO)
            os.write(writing, b".")
            for record in RECORDS[first:end]:
                tracker.log(record)
                os.write(writing, b".")
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    return pid, reading


def said_by(pid: int, reading: int) -> tuple[int, bool]:
    """(how often it said something, whether it was killed), once it has ended."""
    status = os.waitpid(pid, 0)[1]
    with os.fdopen(reading, "rb") as stream:
        said = len(stream.read())
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or os.WEXITSTATUS(status) == 0
    return said, killed


def steps_in(path: Path, first: int, said: int) -> int:
    """How many steps are there: all whole, once, and none less than the process said, which began at `first`."""
    if said == 0 and first == 0:
        with suppress(LoadError):
            assert not read_run(path).scalars
        return 0
    run = read_run(path)
    steps = list(run.scalars)
    assert steps == list(range(len(steps)))
    assert first + max(said - 1, 0) <= len(steps) <= first + max(said, 1), (first, said, steps)
    assert same(run.columns, {name: column[: HEADS * len(steps)] for name, column in EXPECTED.items()})
    if path.is_dir() and steps:
        table = pyarrow.parquet.read_table(path, columns=list(_KEYS)).to_pydict()
        rows = Counter(zip(*(table[name] for name in _KEYS), strict=True))
        assert set(rows.values()) == {1}, "rows are there twice"
        assert set(rows) >= set(zip(*(run.columns[name] for name in _KEYS), strict=True))
    return len(steps)


def kill_everywhere(name: str, folder: Path) -> int:
    """In how many places a process was killed that logs three steps."""
    for count in itertools.count():
        path = folder / f"run-{count}"
        said, killed = said_by(*log_in_child(name, path, 0, 3, count))
        there = steps_in(path, 0, said)
        if not killed:
            return count
        # Killed again while it is gone on with, and then gone on with to the end.
        said, _ = said_by(*log_in_child(name, path, there, there + 3, random.randrange(12)))
        there = steps_in(path, there, said)
        said, _ = said_by(*log_in_child(name, path, there, there + 3))
        assert steps_in(path, there, said) == there + 3
    raise AssertionError


def watch_for(seconds: float, path: Path, *, begun: bool) -> None:
    """Read a run while another process writes it: there is never less of it, and never a part of a step."""
    end, there = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        try:
            run = read_run(path)
        except LoadError:
            assert not begun
            continue
        begun = True
        assert list(run.scalars) == list(range(len(run.scalars)))
        assert len(run.scalars) >= there
        assert len(run.columns["step"]) == HEADS * len(run.scalars)
        there = len(run.scalars)


def kill_at_random(name: str, folder: Path, often: int) -> int:
    """How many processes were killed at work, in some of the first milliseconds."""
    there, killed_ones, run = 0, 0, folder
    for number in range(often):
        if there in (0, len(RECORDS)):
            there, run = 0, folder / f"random-{number}"
        pid, reading = log_in_child(name, run, there, len(RECORDS))
        watch_for(random.uniform(0.0, 0.06), run, begun=there > 0)
        os.kill(pid, signal.SIGKILL)
        said, killed = said_by(pid, reading)
        there = steps_in(run, there, said)
        killed_ones += killed
    return killed_ones


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    random.seed(20261129)
    os.fsync = lambda _handle: None  # what a killed process wrote is with the system; only a loss of power takes it
    json_lines._BLOCK, parquet._ROWS, parquet._STEPS = 611, 20, 2  # so that files end and begin on the way
    sys.stdout.write(f"{kill_everywhere(name, folder)} {kill_at_random(name, folder, 8)}\n")


if __name__ == "__main__":
    main()
