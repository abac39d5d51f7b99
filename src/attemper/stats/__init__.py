"""The statistics algebra: one record per row of logits, its merges, its derived figures, and their summary per head."""

from attemper.stats.heads import HISTOGRAM_EDGES, HeadStats, RowsByHead
from attemper.stats.histograms import cells_of
from attemper.stats.merging import merge
from attemper.stats.rows import FIELDS, SATURATED_PEAK, RowStats, moments, record_and_weights
from attemper.stats.shapes import broadcasts_to

__all__ = [
    "FIELDS",
    "HISTOGRAM_EDGES",
    "SATURATED_PEAK",
    "HeadStats",
    "RowStats",
    "RowsByHead",
    "broadcasts_to",
    "cells_of",
    "merge",
    "moments",
    "record_and_weights",
]
