"""Files that are there whole or not at all."""

import contextlib
import os
import tempfile
from pathlib import Path

from attemper.errors import LoadError


def check_writable(path: Path, argument: str) -> None:
    """Find out before a long run that its result could not be written.

    Raises:
        LoadError: there is no such folder, or the path is one.
    """
    if path.is_dir() or not path.parent.is_dir():
        raise LoadError(
            f"{argument} {path}: {'it is a folder' if path.is_dir() else f'{path.parent} does not exist'}; expected a file"
        )
    if not os.access(path.parent, os.W_OK):
        raise LoadError(f"{argument} {path}: {path.parent} may not be written")


def write_whole(path: Path, text: str) -> None:
    """Write a text file beside its place and move it there, so that a reader sees the old file or the new one.

    A link is followed: what it leads to is replaced.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():  # /dev/stdout, a pipe: there is nothing to replace
        path.write_text(text, "utf-8")
        return
    handle, name = tempfile.mkstemp(prefix=f".{path.name[:100]}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask()
        Path(name).chmod(mode)  # mkstemp's own is for the owner alone
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
