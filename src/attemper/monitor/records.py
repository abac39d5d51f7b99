"""What a watched run consists of: plain records, one a logged step, that trackers write and alarms read.

Everything in them is on the CPU, over all ranks and of all heads; a record is made once, in `Watch.step`, and never changed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from attemper.stats import HeadStats

Severity = Literal["error", "warning", "info"]  # the worst first


@dataclass(frozen=True)
class WeightNorms:
    """Frobenius norms of the projections of one attention module, as its own layout tells them apart.

    Attributes:
        query, key, value: of W_q, W_k and W_v, all heads together.
    """

    query: float
    key: float
    value: float


@dataclass(frozen=True, eq=False)
class LayerRecord:
    """One attention module (one of its calls in a forward pass, where it is called more than once) at one logged step.

    Attributes:
        layer: dotted name of the module in the model, "" for the model itself.
        call: which of its calls in one forward pass, from 0.
        stats: of each head, over every row that was measured in the step.
        scaled_max: float64 [heads], the largest |scale·q·k|, before softcap, bias and mask; −inf without rows.
        norms: of its projections, where its layout is known.
    """

    layer: str
    call: int
    stats: HeadStats = field(repr=False)
    scaled_max: Tensor = field(repr=False)
    norms: WeightNorms | None = None

    @property
    def name(self) -> str:
        """The layer, with the call behind it where it is not the first: "encoder.layer#3"."""
        return f"{self.layer}#{self.call}" if self.call else self.layer

    def figure(self, name: str) -> Tensor:
        """One of `FIGURES`, float64 [heads]."""
        return BY_NAME[name].of(self).double()


@dataclass(frozen=True)
class Alarm:
    """A rule over time that fired.

    Attributes:
        code: its rule, ATT5xx. severity: as in the findings of check.
        step: at which logged step. layer, call: where. head: which one, None where the rule is about the layer.
        figure: what was measured. value: how much. threshold: against which number.
        message: one line for a person: what, where, and what it leads to.
    """

    code: str
    severity: Severity
    step: int
    layer: str
    call: int
    head: int | None
    figure: str
    value: float
    threshold: float
    message: str


@dataclass(frozen=True, eq=False)
class StepRecord:
    """One logged step.

    Attributes:
        step: number of the step, counted from 0 by `Watch.step` or given to it.
        time: seconds since the epoch.
        layers: in the model's order.
        alarms: that fired at this step.
        scalars: what the caller gave to `step` beside it, such as the loss.
    """

    step: int
    time: float
    layers: tuple[LayerRecord, ...]
    alarms: tuple[Alarm, ...] = ()
    scalars: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """One line: what the caller gave, the largest logit and the smallest entropy with their heads, and the alarms."""
        parts = [f"step {self.step}", *(f"{shown(name)} {value:.6g}" for name, value in self.scalars.items())]
        for name in ("max_logit", "normalized_entropy"):
            if self.layers:
                values = torch.cat([layer.figure(name) for layer in self.layers])
                largest = BY_NAME[name].worst == "max"
                values = values.nan_to_num(-math.inf if largest else math.inf)
                at = int(values.argmax() if largest else values.argmin())
                parts.append(f"{'largest' if largest else 'smallest'} {name} {float(values[at]):.4g} ({self._place(at)})")
        return ", ".join([*parts, *(f"{alarm.code} at {shown(alarm.layer) or 'model'}" for alarm in self.alarms)])

    def _place(self, at: int) -> str:
        for layer in self.layers:
            if at < layer.stats.heads:
                return f"{shown(layer.name) or 'model'}, head {at}"
            at -= layer.stats.heads
        raise IndexError(at)


def shown(text: str) -> str:
    """A name or message as a terminal may have it: control characters written out."""
    return text if text.isprintable() else ascii(text)[1:-1]


@dataclass(frozen=True)
class RunInfo:
    """What is known of a run before its first step.

    Attributes:
        model: class of the model. mode: "observe" or "use". every: steps from one record to the next. rows: stride of the rows.
        started: seconds since the epoch. version: of attemper. world: how many processes.
    """

    model: str
    mode: str
    every: int
    rows: int
    started: float
    version: str
    world: int = 1


class Figure(NamedTuple):
    """One number a head.

    Attributes:
        name: as columns and tags write it. words: what it is, for a person. unit: "" for a pure number.
        worst: which end is worth a look, "max" or "min"; a layer's scalar is that over its heads.
        scalar: whether trackers for people get it a layer; the others are in the tables alone.
        of: reads it.
        whole: whether it is a count, int64; the others are float64.
    """

    name: str
    words: str
    unit: str
    worst: Literal["max", "min"]
    scalar: bool
    of: Callable[[LayerRecord], Tensor]
    whole: bool = False


FIGURES: tuple[Figure, ...] = (
    Figure("max_logit", "largest logit", "", "max", True, lambda record: record.stats.max),
    Figure("min_logit", "smallest logit", "", "min", False, lambda record: record.stats.min),
    Figure("max_scaled_product", "largest |scale·q·k|", "", "max", True, lambda record: record.scaled_max),
    Figure("max_product", "largest |q·k|, before the scale", "", "max", False, lambda record: record.stats.product_absmax),
    Figure("max_centred", "largest max − mean of a row", "", "max", False, lambda record: record.stats.centred_max),
    Figure("mean_centred", "mean of max − mean", "", "max", False, lambda record: record.stats.mean_centred_max),
    Figure("entropy", "mean entropy of a row", "nats", "min", True, lambda record: record.stats.mean_entropy),
    Figure(
        "normalized_entropy", "mean of entropy / ln(keys)", "", "min", True, lambda record: record.stats.mean_normalized_entropy
    ),
    Figure("gain", "mean gain 1 − Σ p²", "", "min", True, lambda record: record.stats.mean_gain),
    Figure("peak", "mean of the largest weight of a row", "", "max", False, lambda record: record.stats.mean_peak),
    Figure(
        "jacobian_norm", "mean norm of the softmax's Jacobian", "", "min", False, lambda record: record.stats.mean_jacobian_norm
    ),
    Figure(
        "saturated_share", "share of rows with a weight above 0.99", "", "max", True, lambda record: record.stats.saturated_share
    ),
    Figure("rows", "rows measured", "", "max", False, lambda record: record.stats.rows, whole=True),
    Figure("empty_rows", "rows without a visible key", "", "max", False, lambda record: record.stats.empty_rows, whole=True),
    Figure(
        "nonfinite_rows",
        "rows with a NaN or infinite logit",
        "",
        "max",
        False,
        lambda record: record.stats.nonfinite_rows,
        whole=True,
    ),
)
BY_NAME = {figure.name: figure for figure in FIGURES}


@dataclass(frozen=True, eq=False)
class Run:
    """What a tracker wrote to files, read back by `read_run`.

    Attributes:
        info: what was known as the run began.
        columns: one list each of `COLUMNS`, one entry a head of a layer of a logged step, in order of step, layer and head.
            A mean over no row is NaN; norms of a module whose layout is not known are None.
        scalars: for every step that is in the answer, in order, what the caller gave to it.
        alarms: in order of step.
        attempt: how often training went back to an earlier step, by a checkpoint or by hand. What had been logged from that step
            on is in the files, and not in this answer.
    """

    info: RunInfo
    columns: dict[str, list[Any]]
    scalars: dict[int, dict[str, float]]
    alarms: tuple[Alarm, ...]
    attempt: int = 0


KEYS = ("step", "time", "layer", "call", "head")
NORMS = ("query_norm", "key_norm", "value_norm")
COLUMNS = (*KEYS, *BY_NAME, *NORMS)
