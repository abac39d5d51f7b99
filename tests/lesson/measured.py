"""Each topic measured once for all tests of this process."""

import functools

from attemper.lesson.figures import Measured
from attemper.lesson.making import measure


@functools.cache
def measured(topic: str, seed: int = 0) -> Measured:
    """A topic's figures."""
    return measure(topic, seed)
