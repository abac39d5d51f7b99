"""The option --html: what could go wrong with it is found before the model runs, which may take long."""

from collections.abc import Callable
from pathlib import Path

from attemper.checker import RULES
from attemper.files import check_writable
from attemper.report import Report
from attemper.report.page import require_page


def page_writer(path: Path | None) -> Callable[[Report], None]:
    """A function that writes a report's page to `path`; without a path it does nothing.

    Raises:
        ArgumentError: the file could not be written.
        MissingExtraError: a package of the extra `html` is absent.
    """
    if path is None:
        return lambda _report: None
    require_page()
    check_writable(path, "--html")
    return lambda report: report.save_html(path, {rule.code: rule for rule in RULES})
