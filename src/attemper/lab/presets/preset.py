"""What a preset is: a question, the runs that answer it, and how the answer is read from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from attemper.lab.config import RunConfig
from attemper.lab.store.results import RunResult
from attemper.report.sweeps import Answer

Effort = Literal["quick", "full"]


@dataclass(frozen=True)
class Preset:
    """One question.

    Attributes:
        name: as typed. question: in a sentence. sources: papers whose claim it tests, with their arXiv numbers.
        runs: the configurations for an effort: "quick" takes minutes on two cores, "full" up to hours.
        answer: what the results say. It gets the runs that ended, in the order of `runs`; it must not claim more than they hold.
    """

    name: str
    question: str
    sources: tuple[str, ...]
    runs: Callable[[Effort], Sequence[RunConfig]]
    answer: Callable[[Sequence[RunResult]], Answer]
