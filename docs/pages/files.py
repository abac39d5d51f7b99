"""Where generated pages go: files are written only where they changed, and those that are no longer made are removed."""

from collections.abc import Mapping
from pathlib import Path


def write(path: Path, text: str) -> None:
    """Write a file, unless it says this already: Sphinx would read it anew."""
    path.parent.mkdir(exist_ok=True)
    if not path.exists() or path.read_text("utf-8") != text:
        path.write_text(text, "utf-8")


def write_folder(folder: Path, pages: Mapping[str, str]) -> None:
    """Make a folder hold these pages, by name without ending, and no others.

    Args:
        folder: only generated pages lie in it.
        pages: name → MyST.
    """
    for path in folder.glob("*.md"):
        if path.stem not in pages:
            path.unlink()
    for name, text in pages.items():
        write(folder / f"{name}.md", text)
