"""How much memory the process takes, and how much it may take (`--max-memory`)."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from attemper.errors import ArgumentError, LoadError, UnsupportedError

_SIZE = re.compile(r"(?P<number>\d{1,15}(\.\d{1,9})?)\s*(?P<prefix>[KMGT]?)(?P<binary>i?)B?", re.IGNORECASE)


def size(given: "int | str") -> int:
    """A size in bytes: a number of bytes, or text such as "800MB", "16 GB" (10^9) or "16GiB" (2^30).

    Raises:
        ArgumentError: it is neither, or not positive.
    """
    found = _SIZE.fullmatch(given.strip()) if isinstance(given, str) else None
    if found:
        power = " KMGT".index(found["prefix"].upper() or " ")
        amount = int(float(found["number"]) * (1024 if found["binary"] else 1000) ** power)
    else:
        amount = given if type(given) is int else 0
    if amount <= 0:
        raise ArgumentError("max_memory", repr(given), "a size such as 800MB or 16GiB")
    return amount


def in_words(amount: int) -> str:
    """A size as people write it: "1.25 GB"."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6)):
        if amount >= factor:
            return f"{amount / factor:.3g} {unit}"
    return f"{amount} bytes"


def resident() -> int:
    """Bytes of memory that the process takes now; where the system does not tell that, the most that it took.

    Raises:
        UnsupportedError: the system tells neither.
    """
    try:
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    except OSError:
        pass
    else:
        import resource

        return pages * resource.getpagesize()
    try:
        import resource
    except ImportError:
        raise UnsupportedError("--max-memory: this system does not tell what a process takes; leave it out") from None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


@dataclass(frozen=True)
class Budget:
    """A limit that is looked at while a model runs.

    Attributes:
        limit: bytes that the process may take; model: what to call the model.
    """

    limit: int
    model: str

    def room_for_all(self, weights: int) -> bool:
        """Whether a model with so many bytes of weights can be held whole: half of what is left is for its activations."""
        return 2 * weights <= self.limit - resident()

    def require(self, amount: int, what: str) -> None:
        """Refuse before it begins what cannot fit.

        Raises:
            LoadError: the process would take more than the limit with so many bytes more.
        """
        taken = resident()
        if taken + amount > self.limit:
            raise LoadError(
                f"{self.model} cannot be checked in {in_words(self.limit)}: the process takes {in_words(taken)} and {what} "
                f"{in_words(amount)}; it needs {in_words(taken + amount)} or more, and some for activations"
            )

    def look(self, where: str) -> None:
        """Stop where the limit was passed.

        Raises:
            LoadError: it was.
        """
        taken = resident()
        if taken > self.limit:
            raise LoadError(
                f"{self.model} cannot be checked in {in_words(self.limit)}: the process took {in_words(taken)} in {where}; "
                "allow more, or check it on fewer tokens (--max-tokens)"
            )
