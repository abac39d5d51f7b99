"""Watches training runs: statistics of every head at every logged step, trackers, alarms, and QK-clip."""

from attemper.monitor.records import FIGURES, Alarm, Figure, LayerRecord, RunInfo, StepRecord, WeightNorms

__all__ = ["FIGURES", "Alarm", "Figure", "LayerRecord", "RunInfo", "StepRecord", "WeightNorms"]
