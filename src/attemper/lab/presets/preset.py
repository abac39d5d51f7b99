"""What a preset is: a question, the runs that answer it, and how the answer is read from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from attemper.lab.config import RunConfig
from attemper.lab.store.results import RunResult
from attemper.report.sweeps import Answer

Effort = Literal["quick", "full"]


@dataclass(frozen=True)
class Further:
    """A measurement beyond the trainings, made once when they are over; its rows are kept in the sweep's folder.

    Attributes:
        row: a NamedTuple of numbers and texts, one column of the file a field.
        measure: the rows, from the runs that ended, in the order of `Preset.runs`, for an effort.
    """

    row: type[Any]
    measure: Callable[[Sequence[RunResult], Effort], Sequence[Any]]


@dataclass(frozen=True)
class Product:
    """Files that are made of the trained models, once, when all are over.

    Attributes:
        check: refuses, before anything is trained, configurations of which they cannot be made.
        make: writes them into the sweep's folder, from the runs that ended, in the order of `Preset.runs`.
        last: name of the file that is written last: once it is there, nothing is made again.
    """

    check: Callable[[Sequence[RunConfig]], None]
    make: Callable[[Sequence[RunResult], Path], None]
    last: str


@dataclass(frozen=True)
class Preset:
    """One question.

    Attributes:
        name: as typed. question: in a sentence. sources: whose claim it tests, as "Wortsman et al. 2023, arXiv 2309.14322".
        runs: the configurations for an effort: "quick" takes minutes on two cores, "full" up to
            hours.
        answer: what the results say. It gets the runs that ended, in the order of `runs`, and the rows of `further`, none without
            it; it must not claim more than they hold.
        further: what is measured when the trainings are over. product: what is made of them then.
        given: fields, by dotted names, that answer and measurement take as `runs` has them, beside those in which these differ.
        free: of those in which they differ, the ones that may be a single number in all of them.
    """

    name: str
    question: str
    sources: tuple[str, ...]
    runs: Callable[[Effort], Sequence[RunConfig]]
    answer: Callable[[Sequence[RunResult], Sequence[Any]], Answer]
    further: Further | None = None
    product: Product | None = None
    given: tuple[str, ...] = ()
    free: tuple[str, ...] = ()
