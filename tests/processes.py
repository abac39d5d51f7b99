"""Several processes on this machine, joined by gloo, that run cases together; each case is then one test.

A module of cases has functions that begin with `case_`; each takes nothing, runs on every process alike, and raises where
something is wrong. They share one start, since loading torch takes longer than all of them. A module of tests runs them by

    test_on_four_processes = on_processes(cases, world=4)
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from tests.running import ROOT


def on_processes(cases: ModuleType, world: int, seconds: float = 300.0) -> Callable[[str], None]:
    """A test for each case of a module; all run as the first one is asked for."""
    outcomes = cache(lambda: run_cases(cases, world, seconds))

    @pytest.mark.parametrize("case", names_of(cases))
    def test(case: str) -> None:
        assert not outcomes()[case], outcomes()[case]

    return test


def names_of(cases: ModuleType) -> list[str]:
    """The cases of a module, in its order."""
    return [name for name in vars(cases) if name.startswith("case_")]


def run_cases(cases: ModuleType, world: int, seconds: float) -> dict[str, str]:
    """Run every case on so many processes: name → "" or what went wrong, by rank; what did not come to its turn says so.

    Nobody waits longer than `seconds`: processes that are left are killed.
    """
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(world)}
    with tempfile.TemporaryDirectory() as folder:
        code = f"from tests.processes import work; work({cases.__name__!r}, {folder!r})"
        started = [
            subprocess.Popen(
                [sys.executable, "-c", code],
                cwd=ROOT,
                env=environment | {"RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(world)
        ]
        end = time.monotonic() + seconds
        said = []
        for process in started:
            try:
                said.append(process.communicate(timeout=max(end - time.monotonic(), 0.1))[0])
            except subprocess.TimeoutExpired:
                process.kill()
                said.append(f"killed after {seconds} s\n{process.communicate()[0]}")
        found = [_read(Path(folder) / str(rank)) for rank in range(world)]
    result = {}
    for name in names_of(cases):
        wrong = [
            f"rank {rank}: {one.get(name, f'did not run; it said: {said[rank]}')}"
            for rank, one in enumerate(found)
            if one.get(name) != ""
        ]
        result[name] = "\n".join(wrong)
    return result


def work(module: str, folder: str) -> None:
    """What each process does: join the others, and run the cases up to the first that fails."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(Path(folder) / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=30))
    cases = importlib.import_module(module)
    with (Path(folder) / str(rank)).open("w") as results:
        for name in names_of(cases):
            torch.manual_seed(5)
            wrong = ""
            try:
                getattr(cases, name)()
            except BaseException:  # noqa: BLE001 (whatever it is, the test says it)
                wrong = traceback.format_exc()
            results.write(json.dumps([name, wrong]) + "\n")
            results.flush()
            if wrong:  # the others may be waiting for this process: nothing after it would mean anything
                return
    dist.destroy_process_group()


def _read(path: Path) -> dict[str, str]:
    return dict(json.loads(line) for line in path.read_text().splitlines()) if path.exists() else {}
