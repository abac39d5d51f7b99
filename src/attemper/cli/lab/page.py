"""Where the page of a sweep is written."""

from pathlib import Path

from attemper.errors import MissingExtraError
from attemper.report.files import check_writable, write_whole
from attemper.report.page import require_page
from attemper.report.sweeps import SweepView


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
