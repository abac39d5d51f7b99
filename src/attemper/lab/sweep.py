"""Many runs: in this process one after another, in several processes, or on a Ray cluster; the same training, the same files.

DIR/sweep.json       what was asked for: name, effort, the configurations
DIR/runs/ID/…        see `attemper.lab.store.files`
DIR/table.parquet    one row a run, when all are over
"""

from __future__ import annotations

import json
import multiprocessing
import queue
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from attemper.errors import ArgumentError, LoadError, in_one_line
from attemper.files import write_whole
from attemper.lab.config import RunConfig
from attemper.lab.events import Event, Tell
from attemper.lab.identity import run_id
from attemper.lab.room import check_room, memory_told
from attemper.lab.store.files import RunFiles
from attemper.lab.store.results import RunResult
from attemper.lab.table import NAME as TABLE
from attemper.lab.table import write_table
from attemper.lab.tasks import load_task
from attemper.lab.training import rehearse, train

FORMAT = 1
NAME = "sweep.json"
_POLL = 0.2  # seconds between two looks at what other processes tell


@dataclass(frozen=True)
class Sweep:
    """What was asked for.

    Attributes:
        name: of the preset, or of the configuration file. effort: "quick" or "full"; "" for a file.
        command: that repeats it. runs: the configurations, each once, in order.
        data: what each of them learns from, with its hash; `begin` finds it out.
    """

    name: str
    effort: str
    command: str
    runs: tuple[RunConfig, ...]
    data: tuple[str, ...] = ()


def begin(folder: Path, sweep: Sweep) -> None:
    """Write down what is to be done, or find that it is what the folder is about.

    Raises:
        ArgumentError: the folder holds another sweep or something else, or cannot be written; or a run is impossible.
        LoadError: a run's data cannot be read, or is not what the folder's runs learned from.
    """
    if (folder / NAME).exists():
        there = read(folder)
        if {run_id(run) for run in there.runs} != {run_id(run) for run in sweep.runs}:
            given = f"{folder}, which holds another sweep ({there.name}, {len(there.runs)} runs, by: {there.command})"
            raise ArgumentError("out", given, "a new folder, or the command that began this one")
        _check_data(folder, there, [run for run in there.runs if run.task.path])
        return
    try:
        # What a process left that was killed while it began is no one's.
        if folder.exists() and (not folder.is_dir() or any(not _half(each) for each in folder.iterdir())):
            raise ArgumentError("out", f"{folder}, which holds something else", "a new folder, or an empty one")
        for config in sweep.runs:
            check_room(config)
        with memory_told():
            tasks = {task: load_task(task) for task in dict.fromkeys(run.task for run in sweep.runs)}
            for config in dict.fromkeys(run.model_copy(update={"seed": 0}) for run in sweep.runs):
                rehearse(config, tasks[config.task])
        sweep = replace(sweep, data=tuple(tasks[run.task].data for run in sweep.runs))
        folder.mkdir(parents=True, exist_ok=True)
        fields = asdict(sweep) | {"format": FORMAT, "runs": [run.model_dump(mode="json") for run in sweep.runs]}
        write_whole(folder / NAME, json.dumps(fields, indent=1).encode())
    except OSError as error:
        raise ArgumentError("out", f"{folder} ({error.strerror})", "a folder that can be written") from error


def _half(path: Path) -> bool:
    return path.name.startswith(f".{NAME}.")


def _check_data(folder: Path, sweep: Sweep, runs: Sequence[RunConfig]) -> None:
    """A text that was edited would give runs of one sweep that learned from different things."""
    began = dict(zip((run.task for run in sweep.runs), sweep.data, strict=False))
    for task in dict.fromkeys(run.task for run in runs):
        now = load_task(task).data
        if now != began.get(task, now):
            raise LoadError(
                f"{folder}: its runs learn from {began[task]}, and now there is {now}; put that back, or give a new folder"
            )


def read(folder: Path) -> Sweep:
    """What `begin` wrote.

    Raises:
        LoadError: the folder holds no sweep.
    """
    path = folder / NAME
    if not path.is_file():
        raise LoadError(f"{folder}: no {NAME} is there; expected a folder that `attemper lab run --out` made")
    try:
        fields: dict[str, Any] = json.loads(path.read_text("utf-8"))
        if fields.pop("format") != FORMAT:
            raise LoadError(f"{path}: written by another version of attemper; expected format {FORMAT}")
        runs = tuple(RunConfig.model_validate(run) for run in fields["runs"])
        return _checked(Sweep(**fields | {"runs": runs, "data": tuple(fields.get("data", ()))}))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise LoadError(f"{path}: {in_one_line(error)}; expected what `attemper lab run` wrote") from error


def _checked(sweep: Sweep) -> Sweep:
    """It, if it is what a sweep can be: another program, or a hand, may have written the file."""
    if not all(isinstance(text, str) for text in (sweep.name, sweep.effort, sweep.command, *sweep.data)):
        raise TypeError("name, effort, command or data is no text")
    if sweep.name in ("", "..") or Path(sweep.name).name != sweep.name:
        raise ValueError(f"name is {sweep.name!r}, and no folder can be called so")
    if not sweep.runs or len(sweep.data) not in (0, len(sweep.runs)):
        raise ValueError(f"{len(sweep.runs)} runs, with data of {len(sweep.data)}")
    return sweep


def results(folder: Path) -> list[RunResult]:
    """The runs that are over, in order."""
    found = (RunFiles(folder, run_id(run)).result() for run in read(folder).runs)
    return [result for result in found if result is not None]


def run(folder: Path, jobs: int = 1, tell: Tell = lambda _event: None, ray: str | None = None) -> list[RunResult]:
    """Train what is not over yet, and write the table, unless it is there as the results have it.

    Args:
        folder: where `begin` was.
        jobs: processes at a time; one is this process.
        tell: told of every step, in this process.
        ray: address of a Ray cluster, whose nodes all see the folder under this name; "local" starts one here.

    Returns:
        One result a run, in order.

    Raises:
        ArgumentError: another process trains one of the runs. LoadError: a file is not what it should be, or a process was
            killed; what was trained is kept.
    """
    sweep = read(folder)
    todo = [config for config in sweep.runs if RunFiles(folder, run_id(config)).result() is None]
    _check_data(folder, sweep, todo)
    if ray is not None and todo:
        from attemper.lab.cluster import on_ray

        on_ray(ray, folder, todo, tell)
    elif jobs == 1 or len(todo) == 1:
        for config in todo:
            tell(train_one(folder, config, tell))
    elif todo:
        _in_processes(folder, todo, jobs, tell)
    found = results(folder)
    for result in found:  # what a process left that was killed once it had written the result
        RunFiles(folder, result.id).checkpoint.unlink(missing_ok=True)
    write_table(folder / TABLE, found)
    return found


def train_one(folder: Path, config: RunConfig, tell: Tell) -> Event:
    """Train one run and tell of its steps; what there is to tell when it is over is returned."""
    name = run_id(config)
    last = train(config, folder, lambda step, loss: tell(Event(name, step, config.steps, loss)))
    return Event(name, last.ended + 1, config.steps, last.loss, over=True)


_events: multiprocessing.Queue[Event]  # in a process of the pool


def _listen(events: multiprocessing.Queue[Event]) -> None:
    global _events  # noqa: PLW0603 - what a pool hands to its processes can stand nowhere else
    _events = events


def _train_there(folder: Path, config: RunConfig) -> Event:
    return train_one(folder, config, _events.put)


def _in_processes(folder: Path, todo: Sequence[RunConfig], jobs: int, tell: Tell) -> None:
    # Not by fork: OpenMP hangs in a forked child once its threads are there.
    context = multiprocessing.get_context("spawn")
    events: multiprocessing.Queue[Event] = context.Queue()
    pool = ProcessPoolExecutor(min(jobs, len(todo)), context, _listen, (events,))
    try:
        waiting: set[Future[Event]] = {pool.submit(_train_there, folder, config) for config in todo}
        over: set[str] = set()
        while waiting:
            done, waiting = wait(waiting, _POLL, FIRST_COMPLETED)
            _drain(events, lambda event: event.id in over or tell(event))  # steps of a run may arrive after its end
            for future in done:
                last = future.result()
                over.add(last.id)
                tell(last)
    except BrokenProcessPool as error:
        raise LoadError(
            f"{folder}: a process that trained was killed, perhaps for memory; `attemper lab resume` goes on"
        ) from error
    finally:
        for process in list((pool._processes or {}).values()):
            if any(not future.done() for future in waiting):
                process.terminate()
        pool.shutdown(wait=True, cancel_futures=True)


def _drain(events: multiprocessing.Queue[Event], tell: Tell) -> None:
    while True:
        try:
            tell(events.get_nowait())
        except queue.Empty:
            return
