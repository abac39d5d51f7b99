"""Files that are there whole or not at all."""

import contextlib
import os
import secrets
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
        beside = name_beside(target, "tmp")
        os.close(_created(beside, 0o600))
        beside.unlink()
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


def write_whole(path: "str | os.PathLike[str]", content: "str | bytes | memoryview") -> None:
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


def _write_whole(path: Path, content: "bytes | memoryview") -> None:
    if path.exists() and not path.is_file():  # /dev/stdout, a pipe: there is nothing to replace
        path.write_bytes(content)
        return
    kept = path.stat().st_mode & 0o777 if path.exists() else None
    beside = name_beside(path, "tmp")
    handle = _created(beside, 0o666 if kept is None else kept)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        if kept is not None:
            beside.chmod(kept)  # also what the umask took away
        beside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def _target(path: "str | os.PathLike[str]") -> Path:
    """What a link leads to. That of /dev/stdout to a pipe has a name without a file: it is itself what is written to."""
    named = Path(path)
    return named if named.exists() and not named.is_file() else Path(os.path.realpath(named))


def name_beside(path: Path, ending: str) -> Path:
    """A hidden name in the same folder that nothing has, for what is moved to `path` when it is whole.

    A part of the name is enough: with all of it a long one would be too long.
    """
    return path.with_name(f".{path.name[:40]}.{secrets.token_hex(8)}.{ending}")


def _created(path: Path, mode: int) -> int:
    """A descriptor of a new file; the process's umask takes its share of the mode, as of any file's."""
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0), mode)


def flush_folder(folder: Path) -> None:
    """Write to the disk which files a folder has: a file that was moved there is found after a loss of power only then.

    Raises:
        OSError: the file system cannot do that.
    """
    if os.name == "nt":  # where a folder cannot be opened
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
