"""Watches training runs: statistics of every head at every logged step, trackers, alarms, and QK-clip."""

from attemper.monitor.alarms import Alarms, AlarmThresholds
from attemper.monitor.clipping import QKClip
from attemper.monitor.penalties import Penalties
from attemper.monitor.records import FIGURES, Alarm, Figure, LayerRecord, Run, RunInfo, StepRecord, WeightNorms
from attemper.monitor.runs import read_run
from attemper.monitor.trackers import JSONLines, Live, MLflow, Parquet, TensorBoard, Tracker, Trackio, WandB
from attemper.monitor.watching import Watch, watch

__all__ = [
    "FIGURES",
    "Alarm",
    "AlarmThresholds",
    "Alarms",
    "Figure",
    "JSONLines",
    "LayerRecord",
    "Live",
    "MLflow",
    "Parquet",
    "Penalties",
    "QKClip",
    "Run",
    "RunInfo",
    "StepRecord",
    "TensorBoard",
    "Tracker",
    "Trackio",
    "WandB",
    "Watch",
    "WeightNorms",
    "read_run",
    "watch",
]
