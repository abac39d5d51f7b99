"""What a tracker is."""

from typing import Protocol, runtime_checkable

from attemper.monitor.records import RunInfo, StepRecord


@runtime_checkable
class Tracker(Protocol):
    """Takes the records of one run, on rank 0 alone."""

    def begin(self, run: RunInfo) -> None:
        """Called once, before the first record."""

    def log(self, record: StepRecord) -> None:
        """Called once a logged step. When it returns, the record is on its way: killing the process loses nothing before it."""

    def close(self) -> None:
        """Called once, at the end; never after a kill."""
