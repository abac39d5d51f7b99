"""What a run left behind, as the presets read it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from attemper.lab.config import RunConfig
from attemper.lab.store.curves import Curves, read_curves


@dataclass(frozen=True)
class Evaluation:
    """One loss on held-out examples.

    Attributes:
        kind: "validation", at a step of the training; "logit_factor" or "length", after it.
        at: the step, the factor, or the length.
        loss: in nats a scored position. accuracy: share of the scored positions whose most likely class is right.
    """

    kind: str
    at: float
    loss: float
    accuracy: float


@dataclass(frozen=True, eq=False)
class RunResult:
    """A run that is over.

    Attributes:
        id: hash of the configuration. config: it.
        status: "done", or "diverged": the loss at step `ended`, or the last validation loss, was no finite number.
        ended: the last step, from 0.
        evaluations: in the order in which they were made.
        seconds: from the first step to the last, evaluations and checkpoints between them included. tokens_per_second: of the
            steps alone. peak_mib: the largest resident size of the process meanwhile. Of all parts of a training that was
            interrupted, without what was lost; they differ from run to run.
        machine, versions, data: where, with what, and from what it learned.
    """

    id: str
    config: RunConfig
    status: str
    ended: int
    evaluations: tuple[Evaluation, ...]
    seconds: float
    tokens_per_second: float
    peak_mib: float
    machine: str
    versions: dict[str, str] = field(default_factory=dict)
    data: str = ""
    folder: Path | None = None

    @property
    def loss(self) -> float:
        """The last validation loss; NaN where the training diverged."""
        last = self._last()
        return float("nan") if last is None else last.loss

    @property
    def accuracy(self) -> float:
        """The share of right answers beside it."""
        last = self._last()
        return float("nan") if last is None else last.accuracy

    def losses(self, kind: str) -> dict[float, float]:
        """The loss of each evaluation of a kind, by where it was made: a step, a length, or a factor on the logits."""
        return {each.at: each.loss for each in self.evaluations if each.kind == kind}

    def _last(self) -> Evaluation | None:
        found = [evaluation for evaluation in self.evaluations if evaluation.kind == "validation"]
        return found[-1] if found and self.status == "done" else None

    @cached_property
    def curves(self) -> Curves:
        """Read from the folder when first asked for.

        Raises:
            LoadError: the run's files are not what the lab wrote.
        """
        assert self.folder is not None
        return read_curves(self.folder)
