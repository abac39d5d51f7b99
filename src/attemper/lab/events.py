"""What is told of a sweep while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """What is told while a sweep runs: of the run `id`, at `step` steps of `steps`, the loss; or that it is over."""

    id: str
    step: int
    steps: int
    loss: float
    over: bool = False


Tell = Callable[[Event], object]
