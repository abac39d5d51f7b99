"""From plain records to what a person or a program reads: text, terminal tables, JSON."""

from attemper.report.orders import OrderFigures
from attemper.report.records import Finding, LayerRow, ScaleRange, Severity, Totals, WeightRow
from attemper.report.report import Report
from attemper.report.rule import Rule

__all__ = ["Finding", "LayerRow", "OrderFigures", "Report", "Rule", "ScaleRange", "Severity", "Totals", "WeightRow"]
