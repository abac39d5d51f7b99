"""Watches training runs: statistics of every head at every logged step, trackers, alarms, and QK-clip."""

from attemper.monitor.records import FIGURES, Alarm, Figure, LayerRecord, RunInfo, StepRecord, WeightNorms
from attemper.monitor.watching import Watch, watch

__all__ = ["FIGURES", "Alarm", "Figure", "LayerRecord", "RunInfo", "StepRecord", "Watch", "WeightNorms", "watch"]
