"""Files that are there whole or not at all."""

import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from attemper.errors import ArgumentError


def check_writable(path: "str | os.PathLike[str]", argument: str) -> None:
    """Find out before a long run that its result could not be written.

    A file is created beside it and removed: that alone tells on read-only file systems, and for a user who may do anything.

    Raises:
        ArgumentError: it is a folder, its folder does not exist, or nothing can be created there.
    """
    if os.fspath(path) == "-":
        raise ArgumentError(argument, "'-', which many commands read as stdout", "the name of a file, such as ./- or /dev/stdout")
    target = _target(path)
    if target.is_dir():
        raise ArgumentError(argument, f"a folder, {path}", "the name of a file")
    if not target.parent.is_dir():
        raise ArgumentError(argument, f"{path}", f"a file in a folder that exists; create {target.parent} first")
    if target.exists() and not target.is_file():  # /dev/stdout, a pipe: there is nothing to create
        return
    try:
        handle, name = _beside(target)
        os.close(handle)
        Path(name).unlink()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ArgumentError(argument, f"{path} ({reason})", "a file in a folder that can be written") from error


def check_distinct(named: "Sequence[tuple[str, str | os.PathLike[str]]]") -> None:
    """Refuse two results that would be written to one file, each over the other.

    Args:
        named: (argument, path) of each.

    Raises:
        ArgumentError: two of them are one file, by whatever name.
    """
    for place, (argument, path) in enumerate(named):
        for other, before in named[:place]:
            if _is_one(Path(os.path.realpath(path)), Path(os.path.realpath(before))):
                raise ArgumentError(argument, f"{path}", f"another file than {other} {before}, which it would overwrite")


def _is_one(one: Path, two: Path) -> bool:
    if one.exists() and not one.is_file():  # /dev/null, a pipe: nothing is lost there
        return False
    return one == two or (one.exists() and two.exists() and one.samefile(two))


def write_whole(path: "str | os.PathLike[str]", content: str | bytes) -> None:
    """Write a file, text as UTF-8, beside its place and move it there, so that a reader sees the old file or the new one.

    A link is followed: what it leads to is replaced.

    Raises:
        OSError: it cannot be written, and the error names it; nothing is left behind.
    """
    try:
        _write_whole(_target(path), content.encode() if isinstance(content, str) else content)
    except BrokenPipeError:  # nobody reads any more
        raise
    except OSError as error:  # writing to a file that is open says only why
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def _write_whole(path: Path, content: bytes) -> None:
    if path.exists() and not path.is_file():  # /dev/stdout, a pipe: there is nothing to replace
        path.write_bytes(content)
        return
    handle, name = _beside(path)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~umask()
        Path(name).chmod(mode)  # mkstemp's own is for the owner alone
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def _target(path: "str | os.PathLike[str]") -> Path:
    """What a link leads to. That of /dev/stdout to a pipe has a name without a file: it is itself what is written to."""
    named = Path(path)
    return named if named.exists() and not named.is_file() else Path(os.path.realpath(named))


def _beside(path: Path) -> tuple[int, str]:
    return tempfile.mkstemp(prefix=f".{path.name[:100]}.", suffix=".tmp", dir=path.parent)


def umask() -> int:
    """The permissions that new files of this process do not get."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
