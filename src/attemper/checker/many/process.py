"""One check in a process of its own: whatever becomes of it, the others go on, and there is a result."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from attemper.checker.many.records import ModelResult
from attemper.checker.options import one_line
from attemper.report.records import COULD_NOT_RUN


def check_one(
    model: str, arguments: Sequence[str], timeout: float | None, threads: int, started: Callable[[subprocess.Popen[str]], None]
) -> ModelResult:
    """Run `attemper check MODEL` and read its report.

    Args:
        arguments: further options. timeout: in seconds; None: as long as it takes. threads: for torch.
        started: called with the process, so that whoever waits for it can end it.
    """
    command = [sys.executable, "-m", "attemper", "check", "--output-format", "json", *arguments, "--", model]
    environment = {"OMP_NUM_THREADS": str(threads)} | os.environ
    begin = time.monotonic()
    try:
        # A session of its own, so that the processes that a model starts end with it.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            env=environment,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:  # a name too long for a command line, or with a zero byte in it
        return ModelResult(model, COULD_NOT_RUN, 0.0, error=f"its process could not be started: {one_line(error)}")
    started(process)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        end(process)
        process.communicate()
        return ModelResult(model, COULD_NOT_RUN, time.monotonic() - begin, error=f"no answer within {timeout:g} seconds; ended")
    except BaseException:
        end(process)
        raise
    return _result(model, process.returncode, out, err, time.monotonic() - begin)


def end(process: "subprocess.Popen[str]") -> None:
    """End the process and what it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()


def _result(model: str, code: int, out: str, err: str, seconds: float) -> ModelResult:
    last = next((line for line in reversed(err.splitlines()) if line.strip()), "").removeprefix("attemper: ")
    if code < 0:
        with contextlib.suppress(ValueError):
            last = f"its process was ended by {signal.Signals(-code).name}"
        hint = "; out of memory?" if -code == signal.SIGKILL else ""
        return ModelResult(model, COULD_NOT_RUN, seconds, error=f"{last}{hint}")
    try:
        report = json.loads(out) if code != COULD_NOT_RUN else None
    except ValueError:
        report = None
    if code == COULD_NOT_RUN or not isinstance(report, dict):
        return ModelResult(model, COULD_NOT_RUN, seconds, error=last or f"exit code {code} and no report")
    return ModelResult(model, code, seconds, report)
