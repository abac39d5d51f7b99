"""One writer a run: two processes that go on with the same run would mix their steps.

The lock is the system's, on the file or the folder itself: it ends with the process however that ends, so that a killed run can
be gone on with at once, and nothing is left lying beside the run.
"""

import os
import stat
import weakref
from pathlib import Path

from attemper.errors import ArgumentError

try:
    import fcntl
except ImportError:  # Windows, where two writers are not told
    fcntl = None


class Lock:
    """The right to write a run, from when it is made until `release`, or until nothing refers to it any more.

    Args:
        argument: what the caller gave the path as, for the error.
        path: a file or a folder that is there.

    Raises:
        ArgumentError: a tracker has it, of this or of another process.
    """

    def __init__(self, argument: str, path: Path) -> None:
        self._handle: int | None = None
        if fcntl is None or not (path.is_dir() or stat.S_ISREG(path.stat().st_mode)):  # /dev/null is for many
            return
        # Some network file systems lock only what is open for writing, which a folder cannot be.
        self._handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.release()
            given = f"{path}, which another tracker or process is writing"
            raise ArgumentError(argument, given, "a run whose writer has ended, or another path") from error
        except OSError:  # a file system without locks
            self.release()
        else:
            _HELD.add(self)

    def release(self) -> None:
        """Let others write the run."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self.release()


_HELD: "weakref.WeakSet[Lock]" = weakref.WeakSet()


def _let_go() -> None:
    """In a forked process, such as one that loads data: it must not hold the lock when the one that trains is gone."""
    for lock in list(_HELD):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
