"""Where the page of a sweep is written."""

import shutil
from pathlib import Path

from attemper.errors import ArgumentError, MissingExtraError
from attemper.files import check_writable, write_whole
from attemper.report.page import require_page
from attemper.report.sweeps import SweepView


def check_page(path: Path) -> None:
    """Find out before a long run that its page, which was asked for, could not be written.

    Raises:
        MissingExtraError: a package for it is absent. ArgumentError: nothing can be written there.
    """
    require_page()
    check_writable(path, "--html")


def write_page(view: SweepView, path: Path, *, asked_for: bool) -> str:
    """Write it, and say where in a few words; without the extra `html`, say so unless the page was asked for.

    Raises:
        MissingExtraError: the page was asked for, and a package for it is absent. ArgumentError: it cannot be written there.
    """
    try:
        require_page()
    except MissingExtraError as error:
        if asked_for:
            raise
        return f"no page ({error})"
    check_writable(path, "--html")
    from attemper.report.page.sweep_page import sweep_page

    write_whole(path, sweep_page(view))
    return f"page in {path}"


def write_docs(view: SweepView, sweep: Path, into: Path) -> None:
    """The page, the answer as text with its command and time, and the sweep's small tables, in a folder of the sweep's name.

    Raises:
        MissingExtraError: a package for the page is absent. ArgumentError: they cannot be written there.
    """
    from attemper.lab import further, table
    from attemper.lab.sweep import results

    folder = into / view.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        table.write_table(folder / table.NAME, results(sweep))
        if (sweep / further.NAME).exists():  # the view has read it
            shutil.copyfile(sweep / further.NAME, folder / further.NAME)
    except OSError as error:
        raise ArgumentError("--write-docs", f"{into} ({error.strerror})", "a folder that can be written") from error
    write_page(view, folder / "page.html", asked_for=True)
    from attemper.report.sweep_text import sweep_text

    made = f"Made by `{view.command}`: {view.runs} runs, {view.seconds:.0f} s of training in all, on {view.machine}."
    write_whole(folder / "answer.txt", f"{sweep_text(view)}\n\n{made}\n")
