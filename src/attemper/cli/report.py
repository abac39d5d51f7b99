"""The sub-command `report`: a run as a table, and as a page."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from attemper.checker import BY_CODE
from attemper.cli.output import close_stdout, silenced, write_json, write_text
from attemper.errors import ArgumentError
from attemper.files import check_distinct, check_writable, write_whole
from attemper.monitor.runs import read_run
from attemper.report.page import require_page
from attemper.report.runs import RunView
from attemper.report.runs.text import run_text


def command(
    run: Annotated[str, typer.Argument(help="What a tracker wrote: the file of JSONLines or the folder of Parquet.")],
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a page with curves to this file.", show_default=False)
    ] = None,
    layers: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Only layers with such names. May be given several times.", show_default=False),
    ] = None,
    output_format: Annotated[Literal["text", "json"], typer.Option(help="How to write the summary.")] = "text",
) -> None:
    """Summarise a run that attemper.watch wrote or is writing: each layer at the last step, its course, and the alarms.

    Exit codes: 0 written, 2 no such run, or the page cannot be written.
    """
    if html is not None:
        require_page()
        _check_outside(Path(run), html)
        check_writable(html, "--html")
    view = RunView.of(read_run(run)).only(layers or ())
    if html is not None:
        from attemper.report.page.run_page import run_page

        with silenced():
            write_whole(html, run_page(view, BY_CODE, name=run))
    try:
        if output_format == "json":
            write_json(view.to_dict())
        else:
            write_text(run_text(view) + "\n")
    except BrokenPipeError:
        close_stdout()


def _check_outside(run: Path, html: Path) -> None:
    """Refuse a page that would take the place of the run, or of a file of it."""
    check_distinct([("RUN", run), ("--html", html)])
    if run.is_dir() and Path(os.path.realpath(html)).is_relative_to(os.path.realpath(run)):
        raise ArgumentError("--html", f"{html}", f"a file outside of {run}, the folder of the run")
