"""Runs the checks, a few at a time."""

import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from attemper.checker.many.process import check_one, end
from attemper.checker.many.records import ManyReport, ModelResult
from attemper.errors import ArgumentError


def check_many(
    models: Sequence[str],
    arguments: Sequence[str] = (),
    *,
    jobs: int = 1,
    timeout: float | None = None,
    ray: str | None = None,
    done: Callable[[ModelResult], None] | None = None,
) -> ManyReport:
    """Check each model in a process of its own.

    Args:
        models: what `attemper check` takes. arguments: further options of it, for all.
        jobs: how many at a time, on this machine; torch's threads are divided among them unless OMP_NUM_THREADS says otherwise.
        timeout: seconds that one may take; None: any.
        ray: address of a Ray cluster whose nodes have attemper and see the models under the same names; "local": one on this
            machine for the time being; None: no Ray. There jobs does not apply: each check takes one CPU of the cluster.
        done: called with each result as it comes.

    Raises:
        ArgumentError: jobs or timeout is not above 0. MissingExtraError: Ray is asked for and not installed.
    """
    if jobs < 1:
        raise ArgumentError("jobs", jobs, "1 or more")
    if timeout is not None and not timeout > 0:
        raise ArgumentError("timeout", timeout, "seconds, above 0")
    tell = done or (lambda _result: None)
    if ray is not None:
        from attemper.checker.many.cluster import on_ray

        return ManyReport(on_ray(ray, models, arguments, timeout, tell))
    return ManyReport(_here(models, arguments, jobs, timeout, tell))


def _here(
    models: Sequence[str], arguments: Sequence[str], jobs: int, timeout: float | None, tell: Callable[[ModelResult], None]
) -> tuple[ModelResult, ...]:
    running: list[subprocess.Popen[str]] = []
    stopping = threading.Event()

    def started(process: "subprocess.Popen[str]") -> None:
        running.append(process)
        if stopping.is_set():  # it came just after the others were ended
            end(process)

    threads = max(1, len(os.sched_getaffinity(0)) // jobs) if hasattr(os, "sched_getaffinity") else 1
    pool = ThreadPoolExecutor(jobs)
    try:
        futures = [pool.submit(check_one, model, arguments, timeout, threads, started) for model in models]
        remaining: set[Future[ModelResult]] = set(futures)
        while remaining:
            finished, remaining = wait(remaining, return_when=FIRST_COMPLETED)
            for future in finished:
                tell(future.result())
        return tuple(future.result() for future in futures)
    except BaseException:
        stopping.set()
        pool.shutdown(wait=False, cancel_futures=True)
        for process in running.copy():
            if process.poll() is None:
                end(process)
        raise
    finally:
        pool.shutdown(wait=True)
