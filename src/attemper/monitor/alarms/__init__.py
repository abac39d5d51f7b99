"""Alarms: rules over time, which look at each logged step and remember what they saw before.

`Alarms` holds all of them. A rule fires when its threshold is crossed, and again only after what it measures has receded
clearly or has grown tenfold: not at every step. What the codes mean is said in `attemper rule ATT5xx`.
"""

from attemper.monitor.alarms.looking import Alarms
from attemper.monitor.alarms.thresholds import AlarmThresholds

__all__ = ["AlarmThresholds", "Alarms"]
