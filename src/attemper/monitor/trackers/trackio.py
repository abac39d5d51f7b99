"""A run as trackio shows it."""

from typing import TYPE_CHECKING, Any, ClassVar

from attemper.errors import MissingExtraError
from attemper.monitor.records import RunInfo, StepRecord
from attemper.monitor.trackers.rows import fields_of
from attemper.monitor.trackers.summary import Summary

if TYPE_CHECKING:
    import trackio as trackio_package

_LEVELS = {"error": "error", "warning": "warn", "info": "info"}


class Trackio:
    """Logs to a run of trackio: the one given, else the one that is going on, else one of its own.

    Args:
        run: what `trackio.init` returned; left open at the end.
        project: of a run of its own.
        most: scalars of one step; see `Summary`.
        init: for `trackio.init`, where there is no run: name, resume, space_id and the others. Its own logging of the processor
            and the accelerator is off unless `auto_log_cpu` or `auto_log_gpu` asks for it.

    Raises:
        MissingExtraError: by `begin`, without trackio.
    """

    WHERE: ClassVar[str] = "project"  # the argument that is meant by the place of "trackio:PLACE"

    def __init__(
        self, run: "trackio_package.Run | None" = None, *, project: str = "attemper", most: int = 500, **init: Any
    ) -> None:
        self._given = run
        self._init: dict[str, Any] = {"project": project, "auto_log_cpu": False, "auto_log_gpu": False, "embed": False, **init}
        self._summary = Summary(most, "Trackio")
        self._run: trackio_package.Run  # from begin on
        self._own = False

    def begin(self, run: RunInfo) -> None:
        """Find the run, or start one."""
        try:
            import trackio
            from trackio import context_vars
        except ImportError as error:
            raise MissingExtraError("trackio", "trackio", "log to trackio") from error
        present = self._given or context_vars.current_run.get()
        self._own = present is None
        if present is None:
            config = {**self._init.get("config", {}), "attemper": fields_of(run)}
            init: dict[str, Any] = {**self._init, "config": config}
            present = trackio.init(**init)
        self._run = present

    def log(self, record: StepRecord) -> None:
        """Log the scalars of the step, and an alert for each alarm."""
        from trackio import AlertLevel

        self._run.log(self._summary.scalars(record), step=record.step)
        for alarm in record.alarms:
            self._run.alert(f"attemper {alarm.code}", alarm.message, AlertLevel(_LEVELS[alarm.severity]), step=record.step)
        _flush(self._run)

    def close(self) -> None:
        """End the run, if it was started here."""
        if self._own:
            import trackio

            trackio.finish()


def _flush(run: Any) -> None:
    """Store what was logged now: trackio's own thread does so each half second, which a kill would lose.

    It offers no public way; where a version has no such method either, its thread remains. A run that is sent to a server is left
    to that thread, since this one would wait for the network.
    """
    flush, lock = getattr(run, "_flush_queues_inline", None), getattr(run, "_client_lock", None)
    if flush is not None and lock is not None and getattr(run, "_is_local", False):
        with lock:
            flush()
