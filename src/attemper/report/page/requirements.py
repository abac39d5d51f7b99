"""What a page needs beyond torch, asked for before anything long runs."""

import importlib.util

from attemper.errors import MissingExtraError

_PACKAGES = {"jinja2": "jinja2", "altair": "altair", "markdown_it": "markdown-it-py", "vl_convert": "vl-convert-python"}


def require_page() -> None:
    """Do nothing if a page can be made here.

    Raises:
        MissingExtraError: a package of the extra `html` is absent.
    """
    for module, package in _PACKAGES.items():
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(package, "html", "make a report page")
