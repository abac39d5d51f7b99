"""A run as Weights & Biases shows it."""

from typing import TYPE_CHECKING, Any, ClassVar

from attemper.errors import MissingExtraError
from attemper.monitor.records import RunInfo, StepRecord
from attemper.monitor.trackers.rows import fields_of
from attemper.monitor.trackers.summary import Summary

if TYPE_CHECKING:
    import wandb as wandb_package

_STEP = "watch/step"
_LEVELS = {"error": "ERROR", "warning": "WARN", "info": "INFO"}
# Seconds after which what was logged is in the .wandb file; wandb's own is 15, which a kill would lose.
_FLUSH = 0.05


class WandB:
    """Logs to a run of W&B: the one given, else the one that is going on, else one of its own.

    Numbers are drawn over `watch/step`, the step of the record, and W&B's own count of steps is left to whoever else logs there.
    An alarm is an alert of W&B.

    Args:
        run: what `wandb.init` returned; left open at the end.
        most: scalars of one step; see `Summary`.
        init: for `wandb.init`, where there is no run: project, name, dir, mode, resume and the others.

    Raises:
        MissingExtraError: by `begin`, without wandb.
    """

    WHERE: ClassVar[str] = "project"  # the argument that is meant by the place of "wandb:PLACE"

    def __init__(self, run: "wandb_package.Run | None" = None, *, most: int = 500, **init: Any) -> None:
        self._given, self._init = run, init
        self._summary = Summary(most, "WandB")
        self._run: wandb_package.Run  # from begin on
        self._own = False

    def begin(self, run: RunInfo) -> None:
        """Find the run, or start one."""
        try:
            import wandb
        except ImportError as error:
            raise MissingExtraError("wandb", "wandb", "log to Weights & Biases") from error
        present = self._given or wandb.run
        self._own = present is None
        if present is None:
            init = dict(self._init)
            if "settings" not in init and "x_transaction_log_flush_interval" in wandb.Settings.model_fields:
                init["settings"] = wandb.Settings(x_transaction_log_flush_interval=_FLUSH)
            present = wandb.init(**init)
        self._run = present
        self._run.config.update({"attemper": fields_of(run)}, allow_val_change=True)
        for tags in ("attention/*", "watch/*"):
            self._run.define_metric(tags, step_metric=_STEP)

    def log(self, record: StepRecord) -> None:
        """Log the scalars of the step, and an alert for each alarm."""
        self._run.log({_STEP: record.step, **self._summary.scalars(record)})
        for alarm in record.alarms:
            self._run.alert(f"attemper {alarm.code}", f"step {alarm.step}: {alarm.message}", level=_LEVELS[alarm.severity])

    def close(self) -> None:
        """End the run, if it was started here."""
        if self._own:
            self._run.finish()
