"""Runs to track: records with statistics of attention that was really computed, small and of prime sizes."""

import dataclasses
import math
from typing import Any

import torch

import attemper
from attemper.monitor import Alarm, LayerRecord, RunInfo, StepRecord, WeightNorms
from attemper.monitor.records import COLUMNS, FIGURES
from attemper.stats import HeadStats

INFO = RunInfo(model="Decoder", mode="observe", every=1, rows=1, started=1700000000.5, version=attemper.__version__)
LAYERS = ("", "blocks.0.attn", "blocks.1.attn")
HEADS = {"": 3, "blocks.0.attn": 5, "blocks.1.attn": 5}


def stats_of(name: str, step: int, empty: bool = False) -> HeadStats:
    heads = HEADS[name]
    generator = torch.Generator().manual_seed(1000 * LAYERS.index(name) + step)
    query, key, value = (torch.randn(2, heads, 7, 11, generator=generator) * (1 + step) for _ in range(3))
    _, rows = attemper.attention(query, key, value, is_causal=True, return_stats=True)
    real = torch.zeros(2, 7, dtype=torch.bool) if empty else None
    return HeadStats.from_rows(rows, real)


def layer_of(name: str, step: int, call: int = 0, empty: bool = False) -> LayerRecord:
    stats = stats_of(name, step, empty)
    norms = WeightNorms(1.5 + step, 2.5, 3.5) if name else None
    return LayerRecord(name, call, stats, stats.product_absmax / math.sqrt(11), norms)


def record_of(step: int, loss: float | None = None) -> StepRecord:
    """A step of a model with attention of its own, two layers, and one of them called twice; NaN where a layer saw no row."""
    layers = (*(layer_of(name, step) for name in LAYERS), layer_of("blocks.1.attn", step, call=1, empty=step % 2 == 1))
    alarm = Alarm("ATT501", "warning", step, "blocks.0.attn", 0, 4, "max_logit", math.inf, 100.0, "a logit is large")
    of_layer = Alarm("ATT503", "error", step, "blocks.1.attn", 1, None, "entropy", 0.25, 0.5, "entropy fell")
    alarms = (alarm, of_layer) if step % 3 == 0 else ()
    return StepRecord(step, 1700000000.25 + step, layers, alarms, {"loss": 3.0 / (1 + step) if loss is None else loss})


def expected(records: list[StepRecord]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for record in records:
        for layer in record.layers:
            for head in range(layer.stats.heads):
                for figure in FIGURES:
                    columns[figure.name].append(figure.of(layer)[head].item())
                norms = dataclasses.astuple(layer.norms) if layer.norms else (None, None, None)
                row = (record.step, record.time, layer.layer, layer.call, head)
                for name, value in zip(("step", "time", "layer", "call", "head"), row, strict=True):
                    columns[name].append(value)
                for name, value in zip(("query_norm", "key_norm", "value_norm"), norms, strict=True):
                    columns[name].append(value)
    return columns


def same(first: dict[str, list[Any]], second: dict[str, list[Any]]) -> bool:
    """Whether they are equal to the bit and the type, a NaN beside a NaN."""
    return repr({name: first[name] for name in COLUMNS}) == repr(second)
