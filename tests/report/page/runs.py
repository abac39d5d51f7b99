"""Runs to make pages of: one that grows, one that is hostile, one with nothing or nonsense in it."""

import base64
import dataclasses
import json
import math
import zlib
from typing import Any

import torch

from attemper.monitor import LayerRecord
from attemper.report.runs import RunView
from attemper.stats import HeadStats, RowStats
from tests.monitor.runs import INFO, alarm, run_of
from tests.monitor.series import layer, record
from tests.report.page import pages


def view(steps: int = 40, *, alarms: bool = True) -> RunView:
    """Three layers of three heads; head 1 of the first one grows from 2 to 2000."""
    made = []
    for step in range(steps):
        grown = 2.0 * 1000 ** (step / (steps - 1))
        layers = [layer((3.0, grown, 5.0), sharpness=(1.0, 1.0 + step / 8, 2.0))]
        layers += [layer((4.0, 6.0 + number, 5.0), name=f"layers.{number}.attention") for number in (1, 2)]
        told = ()
        if alarms and step in (20, 30):
            told = (alarm(step, severity="warning", code="ATT501"),)
        if alarms and step == 36:
            told = (alarm(step),)
        made.append(dataclasses.replace(record(step, *layers, loss=5.0 - step / 20), alarms=told))
    return RunView.of(run_of(made))


def hostile() -> RunView:
    """Every text that a run brings along is hostile."""
    made = []
    for step in range(3):
        layers = [layer((1.0 + step, 2.0), name=name) for name in pages.HOSTILE]
        told = tuple(
            alarm(step, layer=name, message=name, code=name, head=number % 2) for number, name in enumerate(pages.HOSTILE)
        )
        made.append(dataclasses.replace(record(step, *layers, **{name: float(step) for name in pages.HOSTILE}), alarms=told))
    whole = " ".join(pages.HOSTILE)
    return RunView.of(run_of(made, info=dataclasses.replace(INFO, model=whole, mode=whole, version=whole)))


def broken() -> RunView:
    """One step; heads without numbers, with infinities, zero and a single head; alarms of what is not there."""
    made = record(
        7,
        layer((math.nan, math.inf, -math.inf), nonfinite=(0,)),
        layer((0.0,), name="layers.1.attention"),
        layer((math.nan,), name="layers.2.attention"),
        loss=math.nan,
        lr=math.inf,
    )
    told = (alarm(7, layer="gone"), alarm(7, head=99), alarm(7, head=None), alarm(7, layer="layers.2.attention", head=0))
    return RunView.of(run_of([dataclasses.replace(made, alarms=told)]))


def nothing_but_nan() -> RunView:
    """Two steps; in the last one the second head has not one logit that is a number."""
    logits = torch.zeros(1, 2, 7, 11, dtype=torch.float64)
    made = [record(0, layer((3.0, 4.0)))]
    logits[0, 1] = math.nan
    stats = HeadStats.from_rows(RowStats.from_logits(logits))
    made.append(record(1, LayerRecord("layers.0.attention", 0, stats, torch.tensor([3.0, -math.inf], dtype=torch.float64))))
    return RunView.of(run_of(made))


def unpacked(text: str) -> Any:
    """What the page's script makes of a layer's data."""
    return json.loads(zlib.decompress(base64.b64decode(text)))
