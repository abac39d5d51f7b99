"""Runs for people: what a tracker wrote, as tables in the terminal and as text; `attemper.report.page` has their page."""

from attemper.report.runs.view import LayerCurves, RunView

__all__ = ["LayerCurves", "RunView"]
