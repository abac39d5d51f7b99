"""What a signal does to a command that must clean up behind itself."""

import contextlib
import signal
from collections.abc import Generator
from typing import Any


@contextlib.contextmanager
def ended_as_interrupted() -> Generator[None]:
    """SIGTERM as Ctrl-C, so that what is half written is removed, and processes that were started are ended."""

    def interrupt(_number: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    try:
        previous = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread, which alone gets signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
