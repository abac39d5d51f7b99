"""Where the records of a run go: files, dashboards, the terminal, any function."""

from attemper.monitor.trackers.base import Tracker

__all__ = ["Tracker"]
