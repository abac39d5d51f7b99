"""Records to the trackers that an `Accelerator` of Hugging Face accelerate has."""

from typing import Any, Protocol

from attemper.monitor.records import RunInfo, StepRecord
from attemper.monitor.trackers.summary import Summary


class Logs(Protocol):
    """What an `Accelerator` does."""

    def log(self, values: dict[str, Any], step: int | None = None) -> Any:
        """Log to each of its trackers."""


class AcceleratorLog:
    """A tracker that hands the scalars of each record to `accelerator.log`, and so to all that `log_with` names.

        accelerator = Accelerator(log_with="tensorboard", project_dir="runs")
        accelerator.init_trackers("attention")
        model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
        watching = attemper.watch(model, trackers=AcceleratorLog(accelerator))

    Where gradients are accumulated, call `watching.step()` where `accelerator.sync_gradients` is true.

    Args:
        accelerator: whose trackers are initialised, and are ended by its `end_training`.
        most: of the scalars of a step; see `Summary`.
    """

    def __init__(self, accelerator: Logs, *, most: int = 500) -> None:
        self._accelerator, self._summary = accelerator, Summary(most, "AcceleratorLog")

    def begin(self, run: RunInfo) -> None:
        """Nothing is to be done: trackers of an accelerator are begun by `init_trackers`."""

    def log(self, record: StepRecord) -> None:
        """Log the scalars of the step, under its number."""
        self._accelerator.log(self._summary.scalars(record), step=record.step)

    def close(self) -> None:
        """Nothing is to be done."""
