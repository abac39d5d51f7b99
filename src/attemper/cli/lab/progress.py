"""How far a sweep is: on a terminal two bars with the loss and the time left, elsewhere a line a run."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Generator

from attemper.lab.events import Event, Tell

_PAUSE = 0.1  # seconds between two paintings of the bars


@contextlib.contextmanager
def progress(runs: int, over: int) -> Generator[Tell]:
    """What a sweep is to tell its events, on stderr.

    Args:
        runs: of the sweep. over: how many of them were over before it began.
    """
    if not sys.stderr.isatty():
        yield _Lines(runs, over)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        sweep = bars.add_task("runs", total=runs, completed=over, loss="")
        current: dict[str, int] = {}
        painted: dict[str, float] = {}

        def tell(event: Event) -> None:
            if event.over:
                if event.id in current:
                    bars.remove_task(current.pop(event.id))  # pyrefly: ignore
                bars.advance(sweep)
                return
            now = time.monotonic()
            if event.id not in current:
                current[event.id] = bars.add_task(event.id, total=event.steps, loss="")
            if now - painted.get(event.id, 0.0) > _PAUSE:
                painted[event.id] = now
                bars.update(current[event.id], completed=event.step, loss=f"loss {event.loss:.3f}")  # pyrefly: ignore

        yield tell


class _Lines:
    """A line a run that is over."""

    def __init__(self, runs: int, over: int) -> None:
        self.runs, self.over = runs, over

    def __call__(self, event: Event) -> None:
        if event.over:
            self.over += 1
            came_to = "diverged" if math.isnan(event.loss) else f"loss {event.loss:.3f}"
            sys.stderr.write(f"run {self.over} of {self.runs}: {event.id}, {came_to}\n")
            sys.stderr.flush()
