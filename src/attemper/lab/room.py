"""Whether a run fits into memory: said before anything is trained where it cannot, and in one line where the system says it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator

from attemper.errors import ArgumentError, in_one_line
from attemper.lab.config import RunConfig
from attemper.lab.tasks.drawing import HELD_OUT
from attemper.lab.tasks.text import BYTES

_OF_LAYER = 2**14  # bytes of Python that a layer is beside its weights, at least
_REFUSED = ("allocate memory", "size calculation overflowed", "integer multiplication overflow")
_SMALLER = "runs that fit: a smaller batch, task.length, model.width, model.head_dim, or fewer layers, heads or symbols"


def least_bytes(config: RunConfig) -> int:
    """What a run holds at the very least: weights, gradients and moments, what goes from layer to layer, and drawn examples."""
    task, model = config.task, config.model
    drawn = task.name in ("recall", "reversal")
    classes = task.symbols if drawn else {"text": BYTES, "digits": 10}[task.name]
    tokens = 16 if task.name == "digits" else task.length
    inner = model.heads * model.head_dim if isinstance(model.head_dim, int) else sum(model.head_dim)
    hidden = 4 * model.width if model.hidden is None else model.hidden
    weights = model.layers * model.width * (4 * inner + 2 * hidden) + 2 * model.width * classes
    moments = 1 if config.optimiser.name == "sgd" else 2
    layers = _OF_LAYER * model.layers + 4 * config.batch * tokens * (classes + model.layers * model.width)
    examples = 8 * HELD_OUT * (task.symbols if task.name == "recall" else task.length) if drawn else 0
    return 4 * (2 + moments) * weights + layers + examples


def check_room(config: RunConfig) -> None:
    """Refuse a run that cannot fit into this machine's memory.

    Raises:
        ArgumentError: it cannot.
    """
    needed, there = least_bytes(config), _memory()
    if there is not None and needed > there:
        given = f"one that needs at least {needed / 2**30:.3g} GiB, of {there / 2**30:.3g} in this machine"
        raise ArgumentError("run", given, _SMALLER)


@contextlib.contextmanager
def memory_told() -> Generator[None]:
    """What the system says of memory that it does not have, as an error with what to do.

    Raises:
        ArgumentError: it said so.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        said = in_one_line(error)
        if isinstance(error, RuntimeError) and not any(words in said for words in _REFUSED):
            raise
        asked = said.partition("you tried to allocate ")[2].partition(".")[0] or "more than can be counted"
        raise ArgumentError("run", f"one for which the system has no memory ({asked} at once)", _SMALLER) from error


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not told here
        return None
