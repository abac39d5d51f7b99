"""Where a tracker writes: what the system says against a place becomes an error about the argument that named it."""

import contextlib
import tempfile
from collections.abc import Generator
from pathlib import Path

from attemper.errors import ArgumentError, AttemperError


@contextlib.contextmanager
def writable(argument: str, path: Path) -> Generator[None]:
    """What runs inside gets ready to write there.

    Args:
        argument: what the caller gave the path as, for the error.

    Raises:
        ArgumentError: the system lets nobody write there, or not this process.
    """
    try:
        yield
    except AttemperError:
        raise
    except (OSError, ValueError) as error:  # of the latter kind: a name with a null character
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        given = f"{str(path)!r}, where nothing can be written ({reason})"
        raise ArgumentError(
            argument, given, "a place that this process may write to; name another, or see to its rights"
        ) from error


def make_folder(argument: str, path: Path) -> None:
    """Make a folder, if it is not there, and try to write in it.

    Raises:
        ArgumentError: a file is in its place, or nothing can be written there.
    """
    with writable(argument, path):
        if path.exists() and not path.is_dir():
            raise ArgumentError(argument, f"a file, {path}", "a folder, or a name that is not taken")
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
