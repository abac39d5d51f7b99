"""Small pieces of MyST that several kinds of page are made of."""

from collections.abc import Iterable, Sequence

from attemper.checker.codes import BY_CODE


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells are MyST.

    Args:
        head: the names of the columns; rows: as many cells each.
    """
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def contents(names: Iterable[str]) -> str:
    """The pages below an index, for the site's menu alone: the index lists them in words."""
    listed = "\n".join(names)
    return f"```{{toctree}}\n:hidden:\n\n{listed}\n```\n"


def code_links(codes: Iterable[str]) -> str:
    """Codes as links to their pages, from a page one folder down."""
    return ", ".join(f"[{code}](../rules/{code}.md) {BY_CODE[code].name}" for code in codes)
