"""Where the records of a run go: files, dashboards, the terminal, any function."""

from attemper.monitor.trackers.base import Tracker
from attemper.monitor.trackers.json_lines import JSONLines
from attemper.monitor.trackers.parquet import Parquet

__all__ = ["JSONLines", "Parquet", "Tracker"]
