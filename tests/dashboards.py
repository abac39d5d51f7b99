"""Logs a run to a dashboard and closes it, then one in which it kills itself: `python -m tests.dashboards NAME FOLDER`."""

import os
import signal
import sys
import time
from pathlib import Path

from attemper.monitor.trackers import MLflow, TensorBoard, Tracker, Trackio, WandB
from tests.monitored import INFO, record_of

RECORDS = [record_of(step) for step in (0, 1, 2, 5)]


def tracker_of(name: str, folder: Path, run: str) -> Tracker:
    """The tracker for a run of that name, below the folder and without a network."""
    if name == "tensorboard":
        return TensorBoard(folder / run, images_every=2)
    if name == "mlflow":
        return MLflow((folder / "mlruns").as_uri(), name=run)
    if name == "trackio":
        return Trackio(project="attemper", name=run)
    return WandB(project="attemper", id=run, dir=str(folder), mode="offline")


def environment(folder: Path) -> dict[str, str]:
    """What keeps those packages off the network and out of the home folder."""
    return {
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "TRACKIO_DIR": str(folder / "trackio"),
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_CONFIG_DIR": str(folder / "wandb_config"),
        "WANDB_CACHE_DIR": str(folder / "wandb_cache"),
    }


def main(name: str, folder: Path) -> None:
    for run in ("closed", "killed"):
        tracker = tracker_of(name, folder, run)
        tracker.begin(INFO)
        for record in RECORDS:
            tracker.log(record)
        if run == "closed":
            tracker.close()
    if name == "wandb":
        time.sleep(0.5)  # its file is written by a process of its own, each twentieth of a second
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
