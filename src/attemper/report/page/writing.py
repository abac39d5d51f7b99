"""Writes a page whole or not at all, and knows beforehand where it could not.

The text goes to a new file beside the target and takes its place in one step, so that a reader sees the old page or the new one.
"""

import os
import secrets
from pathlib import Path

from attemper.errors import ArgumentError


def refuse_target(path: "str | os.PathLike[str]") -> Path:
    """The file that a page will be written to, links followed, if it can be.

    A file is created beside it and removed: that alone tells on read-only file systems, and for a user who may do anything.

    Raises:
        ArgumentError: it is a folder or a device, its folder does not exist, or nothing can be created there.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise ArgumentError("html", f"a folder, {path}", "the name of a file, such as report.html")
    if target.exists() and not target.is_file():
        raise ArgumentError("html", f"{path}, which is no regular file", "the name of a file, such as report.html")
    if not target.parent.is_dir():
        raise ArgumentError("html", f"{path}", f"a file in a folder that exists; create {target.parent} first")
    trial = _beside(target)
    try:
        trial.touch(exist_ok=False)
        trial.unlink()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ArgumentError("html", f"{path} ({reason})", "a file in a folder that can be written") from error
    return target


def write_whole(path: "str | os.PathLike[str]", text: str) -> None:
    """Write the text as UTF-8, in one step.

    Raises:
        ArgumentError: as `refuse_target`.
        OSError: the disk is full, or the like; what stood there before still does.
    """
    target = refuse_target(path)
    fresh = _beside(target)
    try:
        with fresh.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)


def _beside(target: Path) -> Path:
    return target.with_name(f".attemper-{secrets.token_hex(8)}.tmp")
