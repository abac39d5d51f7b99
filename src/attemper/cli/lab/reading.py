"""`lab list`, `lab report` and `lab compare`: what is there already."""

from pathlib import Path
from typing import Annotated

import typer

from attemper.cli.lab.extras import require_lab
from attemper.cli.lab.page import write_docs, write_page
from attemper.cli.output import say, write_text
from attemper.errors import LoadError
from attemper.report.names import safe

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a sweep.")]


def list_(
    folder: Annotated[Path | None, typer.Argument(metavar="[DIR]", help="The folder of a sweep.", show_default=False)] = None,
) -> None:
    """List the presets with their questions, or the runs of a folder with how far they are.

    Exit codes: 0 listed, 2 no such folder.
    """
    require_lab()
    if folder is None:
        from attemper.lab.presets import NAMES, preset

        width = max(map(len, NAMES))
        say([f"{name:{width}}  {preset(name).question}" for name in NAMES], hang=width + 2)
        return
    from attemper.lab.identity import run_id
    from attemper.lab.store.files import RunFiles
    from attemper.lab.sweep import read
    from attemper.lab.table import flat, varied

    runs, lines = read(folder).runs, []
    rows = [flat(config.model_dump(mode="json")) for config in runs]
    others = [name for name in varied(rows) if name not in ("task.name", "model.rule", "model.head_dim")]
    for config, row in zip(runs, rows, strict=True):
        files = RunFiles(folder, run_id(config))
        result = files.result()
        if result is None:
            state = f"stands at {_stands(files.checkpoint)} of {config.steps}" if files.checkpoint.exists() else "to do"
        elif result.status == "diverged":
            state = f"diverged at step {result.ended}"
        else:
            state = f"done, loss {result.loss:.3f}"
        named = safe("".join(f", {name} {row[name]}" for name in others))
        model = config.model
        lines.append(f"{files.id}  {config.task.name}, {model.rule}, d_k {model.head_dim}{named}, seed {config.seed}: {state}")
    say(lines, hang=2)


def _stands(checkpoint: Path) -> str:
    from attemper.lab.store.state import load

    try:
        return f"step {load(checkpoint, tensors=False).step}"
    except LoadError:  # the others are listed all the same; to go on with this one says what is wrong
        return "an unknown step"


def report(
    folder: Folder,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the page there.", show_default=False)] = None,
    docs: Annotated[
        Path | None,
        typer.Option(
            "--write-docs", metavar="FOLDER", help="Also write page, text and small tables below FOLDER.", show_default=False
        ),
    ] = None,
) -> None:
    """Say what a sweep came to, with its tables; --html writes the page anew, --write-docs what a document about it needs.

    Exit codes: 0 written, 2 no such sweep, or some of its runs are not over.
    """
    require_lab()
    from attemper.lab.viewing import view_of
    from attemper.report.sweep_text import sweep_text

    view = view_of(folder)
    if html is not None:
        write_page(view, html, asked_for=True)
    if docs is not None:
        write_docs(view, folder, docs)
    write_text(sweep_text(view) + "\n")


def compare(
    one: Folder,
    two: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of another.")],
) -> None:
    """Compare the runs of two sweeps that differ in the same way: held-out loss, and where seeds match a paired test.

    Exit codes: 0 compared, 2 no such sweeps, or no run of one has its like in the other.
    """
    require_lab()
    from attemper.lab.matching import compared
    from attemper.report.sweep_text import table_text

    write_text(table_text(compared(one, two)) + "\n")
