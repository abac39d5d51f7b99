"""A run as MLflow shows it."""

import posixpath
import tempfile
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from attemper.errors import ArgumentError, MissingExtraError, in_one_line
from attemper.monitor.records import RunInfo, StepRecord
from attemper.monitor.trackers.rows import fields_of
from attemper.monitor.trackers.summary import Summary, text_of

if TYPE_CHECKING:
    from mlflow import MlflowClient

_BATCH = 1000  # metrics that MLflow takes at once
_ALARMS = "attemper/alarms.txt"


class MLflow:
    """Logs to a run of MLflow: the one given, else the one that is going on in this process, else one of its own.

    Numbers are metrics; alarms are lines of the artifact attemper/alarms.txt; what is known of the run are tags.

    Args:
        uri: of the tracking server or store; None for MLflow's own choice (MLFLOW_TRACKING_URI).
        run_id: of a run that is there; left open at the end. Alarms are added to those that it has.
        experiment: for a run of its own. name: of that run.
        most: scalars of one step; see `Summary`.

    Raises:
        ArgumentError: by `begin`, if MLflow cannot log there, or has no such run.
        MissingExtraError: by `begin`, without mlflow or mlflow-skinny.
    """

    def __init__(
        self,
        uri: str | None = None,
        *,
        run_id: str | None = None,
        experiment: str = "attemper",
        name: str | None = None,
        most: int = 500,
    ) -> None:
        self.uri, self.run_id, self.experiment, self.name = uri, run_id, experiment, name
        self._summary = Summary(most, "MLflow")
        self._client: MlflowClient  # from begin on
        self._run: str
        self._own = False
        self._alarms: list[str] = []

    def begin(self, run: RunInfo) -> None:
        """Find the run, or start one."""
        try:
            import mlflow
        except ImportError as error:
            raise MissingExtraError("mlflow-skinny", "mlflow", "log to MLflow") from error
        try:
            self._begin(mlflow, run)
        except (mlflow.MlflowException, OSError, ValueError) as error:
            words = in_one_line(error) or type(error).__name__
            if self.run_id is not None and getattr(error, "error_code", None) == "RESOURCE_DOES_NOT_EXIST":
                raise ArgumentError(
                    "run_id", f"{self.run_id!r} ({words})", "the id of a run that is at that uri, or None"
                ) from error
            given = f"{self.uri!r}, where MLflow cannot log ({words})"
            expected = "a server that answers, such as http://127.0.0.1:5000, or a store that this installation of MLflow can use"
            raise ArgumentError("uri", given, expected) from error

    def log(self, record: StepRecord) -> None:
        """Log the scalars of the step, and write the alarms."""
        from mlflow.entities import Metric

        time = round(record.time * 1000)
        metrics = [Metric(tag, value, time, record.step) for tag, value in self._summary.scalars(record).items()]
        for start in range(0, len(metrics), _BATCH):
            self._client.log_batch(self._run, metrics[start : start + _BATCH], synchronous=True)
        if record.alarms:
            self._alarms += [text_of(alarm) + "\n" for alarm in record.alarms]
            self._client.log_text(self._run, "".join(self._alarms), _ALARMS)

    def close(self) -> None:
        """End the run, if it was started here."""
        if self._own:
            self._client.set_terminated(self._run)

    def _begin(self, mlflow: ModuleType, run: RunInfo) -> None:
        self._client = mlflow.MlflowClient(self.uri)
        present = self.run_id
        if present is None and self.uri is None and (active := mlflow.active_run()) is not None:
            present = active.info.run_id
        self._own = present is None
        if present is None:
            experiment = self._client.get_experiment_by_name(self.experiment)
            number = experiment.experiment_id if experiment else self._client.create_experiment(self.experiment)
            present = self._client.create_run(number, run_name=self.name).info.run_id
        self._run = present
        if not self._own:
            self._alarms = self._alarms_present()
        for name, value in fields_of(run).items():
            self._client.set_tag(self._run, f"attemper.{name}", value)

    def _alarms_present(self) -> list[str]:
        """The lines that are there: an artifact is written whole, so that they would be lost to the next alarm."""
        if not any(file.path == _ALARMS for file in self._client.list_artifacts(self._run, posixpath.dirname(_ALARMS))):
            return []
        with tempfile.TemporaryDirectory() as folder:
            return Path(self._client.download_artifacts(self._run, _ALARMS, folder)).read_text("utf-8").splitlines(keepends=True)
