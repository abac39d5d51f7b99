"""Keeps training going when a tracker fails: a full disk or a lost server must not end a run of days."""

import logging
from collections.abc import Sequence

from attemper.monitor.records import RunInfo, StepRecord
from attemper.monitor.trackers.base import Tracker

_LOGGER = logging.getLogger("attemper")


class Guarded:
    """A tracker whose faults do not reach training, once it has begun.

    A fault in `begin` is raised: nothing has been trained yet, and what is wrong can be put right. A later one is said once, on
    the logger `attemper` with its traceback, and kept; the tracker gets no further record, and is closed at the end like the
    others.

    Attributes:
        tracker: what is guarded. name: of its class or function. fault: what it raised; None while all is well.
    """

    def __init__(self, tracker: Tracker, name: str | None = None) -> None:
        self.tracker, self.name = tracker, name or type(tracker).__name__
        self.fault: Exception | None = None

    def begin(self, run: RunInfo) -> None:
        """Begin; what it raises is raised."""
        self.tracker.begin(run)

    def log(self, record: StepRecord) -> None:
        """Log, unless it has failed before."""
        if self.fault is not None:
            return
        try:
            self.tracker.log(record)
        except Exception as error:
            self.fault = error
            message = "the tracker %s failed at step %d, and gets nothing more of this run: %s"
            _LOGGER.warning(message, self.name, record.step, error, exc_info=error)

    def close(self) -> None:
        """Close."""
        try:
            self.tracker.close()
        except Exception as error:
            self.fault = self.fault or error
            _LOGGER.warning("the tracker %s could not be closed: %s", self.name, error, exc_info=error)


def begin_all(trackers: Sequence[Guarded], run: RunInfo) -> None:
    """Begin each; where one raises, those that had begun are closed before it is raised.

    Raises:
        Exception: what the first that failed raised.
    """
    for number, tracker in enumerate(trackers):
        try:
            tracker.begin(run)
        except BaseException:
            for begun in trackers[:number]:
                begun.close()
            raise
