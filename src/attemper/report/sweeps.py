"""What a sweep's page shows, as plain records: the answer with its number, tables, curves, heat maps, and the limits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Rows of text under a heading; `note` says how to read it."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Series:
    """One curve: y over x, with a band from `low` to `high` (over seeds) where they are given; NaN leaves a gap."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True)
class Chart:
    """Curves on shared axes; `log_x`, `log_y`: logarithmic."""

    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False
    note: str = ""


@dataclass(frozen=True)
class HeatMap:
    """A colour for each (row, column); `values` by row, NaN where there is none."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]
    unit: str
    note: str = ""


@dataclass(frozen=True)
class Answer:
    """What a sweep says.

    Attributes:
        sentence: the answer, with its number and its uncertainty. number: that number as text, to stand large.
        tables, charts, maps: what it rests on, in this order of importance.
        limits: what it does not show, a sentence each.
    """

    sentence: str
    number: str
    tables: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()
    maps: tuple[HeatMap, ...] = ()
    limits: tuple[str, ...] = ()


@dataclass(frozen=True)
class SweepView:
    """A sweep's page: the preset's question, its answer, the command that made it, how long it took and where."""

    name: str
    question: str
    answer: Answer
    sources: tuple[str, ...]
    command: str
    runs: int
    seconds: float
    machine: str
