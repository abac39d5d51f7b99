"""The sub-command `top`: a run in the terminal, read again and again while it is written."""

import sys
import time
from typing import Annotated

import typer

from attemper.cli.output import close_stdout, write_text
from attemper.errors import ArgumentError
from attemper.monitor.runs import read_run
from attemper.report.runs import RunView
from attemper.report.runs.text import run_text

_STEPS = 512  # of the run that are looked at, the last ones
_KEYS = "Ctrl-C ends this; the run goes on."


def command(
    run: Annotated[str, typer.Argument(help="What a tracker writes: the file of JSONLines or the folder of Parquet.")],
    layers: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Only layers with such names. May be given several times.", show_default=False),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print what there is and end, as is done where stdout is no terminal.")
    ] = False,
    interval: Annotated[float, typer.Option(help="Seconds from one look at the files to the next.")] = 1.0,
) -> None:
    """Show the last 512 logged steps of a run that attemper.watch writes, live: each layer's figures, their course, and alarms.

    Ends with Ctrl-C, exit code 130. Exit codes: 0 printed once, 2 no such run.
    """
    if not 0.05 <= interval <= 3600:
        raise ArgumentError("--interval", interval, "seconds, from 0.05 to 3600")
    view = RunView.of(read_run(run, last=_STEPS))
    if once or not sys.stdout.isatty():
        try:
            write_text(run_text(view.only(layers or ())) + "\n")
        except BrokenPipeError:
            close_stdout()
        return
    _show(run, view, layers or [], interval)


def refreshed(run: str, view: RunView) -> RunView:
    """The view with what has been logged since; made anew where training went back, or another run took its place."""
    later = read_run(run, view.steps[-1] if view.steps else None, _STEPS)
    if not view.steps or (later.attempt, later.info.started) != (view.attempt, view.info.started):
        return RunView.of(read_run(run, last=_STEPS))
    return view.then(RunView.of(later), _STEPS) if later.scalars else view


def _show(run: str, view: RunView, globs: list[str], interval: float) -> None:
    from rich.console import Console
    from rich.live import Live

    from attemper.report.runs.terminal import run_screen

    console = Console(file=sys.stdout, highlight=False)
    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            live.update(run_screen(view.only(globs), console.height, _KEYS), refresh=True)
            time.sleep(interval)
            view = refreshed(run, view)
