"""The most memory that the process held while something ran, and freed memory given back."""

from __future__ import annotations

import contextlib
import ctypes
import math
import re
from pathlib import Path
from typing import Self

_RESET, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


class PeakMemory:
    """A context: `mib` is the largest resident size of the process within it, NaN where the system does not tell (not Linux).

    Attributes:
        within: whether it is that of the context alone; else, where the system keeps one peak, since the process began.
    """

    mib, within = math.nan, False

    def __enter__(self) -> Self:
        with contextlib.suppress(OSError):  # an older kernel, or a sandbox
            _RESET.write_text("5", "ascii")
            self.within = True
        return self

    def __exit__(self, *_: object) -> None:
        self.mib = self.so_far()

    def so_far(self) -> float:
        """What `mib` would be if the context ended now."""
        found = re.search(r"^VmHWM:\s+(\d+) kB", _STATUS.read_text("ascii"), re.MULTILINE) if _STATUS.exists() else None
        return int(found[1]) / 1024 if found else math.nan


def give_back() -> None:
    """Hand freed memory back to the system. glibc keeps blocks below 32 MB, in pieces that the next layer does not fit."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library keeps less
        ctypes.CDLL(None).malloc_trim(0)
