"""What a page needs beyond torch, asked for before anything long runs."""

from attemper.errors import require_packages

_PACKAGES = {"jinja2": "jinja2", "altair": "altair", "markdown_it": "markdown-it-py", "vl_convert": "vl-convert-python"}


def require_page() -> None:
    """Do nothing if a page can be made here.

    Raises:
        MissingExtraError: a package of the extra `html` is absent.
    """
    require_packages(_PACKAGES, "html", "make a report page")
