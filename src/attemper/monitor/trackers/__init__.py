"""Where the records of a run go: files, dashboards, the terminal, any function."""

from attemper.monitor.trackers.base import Tracker
from attemper.monitor.trackers.json_lines import JSONLines
from attemper.monitor.trackers.live import Live
from attemper.monitor.trackers.mlflow import MLflow
from attemper.monitor.trackers.parquet import Parquet
from attemper.monitor.trackers.resolve import resolve
from attemper.monitor.trackers.tensorboard import TensorBoard
from attemper.monitor.trackers.trackio import Trackio
from attemper.monitor.trackers.wandb import WandB

__all__ = ["JSONLines", "Live", "MLflow", "Parquet", "TensorBoard", "Tracker", "Trackio", "WandB", "resolve"]
