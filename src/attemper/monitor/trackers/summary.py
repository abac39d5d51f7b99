"""What dashboards get of a record: few numbers, all of them finite, under names that every dashboard takes."""

import logging
import math
import re

import torch
from torch import Tensor

from attemper.monitor.records import FIGURES, Alarm, LayerRecord, StepRecord

_LOGGER = logging.getLogger("attemper")
SCALARS = tuple(figure for figure in FIGURES if figure.scalar)
# Where the smallest head is the worst one, the mean tells whether it is alone.
_MEANS = tuple(figure for figure in SCALARS if figure.worst == "min")
_OF_A_LAYER = len(SCALARS) + len(_MEANS)
_NOT_IN_A_TAG = re.compile(
    r"[^A-Za-z0-9_.\-]"
)  # the smallest set among the dashboards, which is MLflow's, less spaces and colons


class Summary:
    """Reduces the records of one run to scalars, the same ones at every step.

    They are `attention/FIGURE`, the worst head of the model; `attention/LAYER/FIGURE`, the worst head of a layer, and
    `attention/LAYER/mean_FIGURE`, the mean over its heads, for figures of which the smallest is the worst;
    `attention/nonfinite_rows` and `attention/alarms`, how many there were in the step; and `watch/NAME`, what the caller gave to
    the step. A number that is not finite is left out: not every dashboard takes one. Heads without rows have none.

    Args:
        most: of the scalars of a step. Where the layers have more, evenly spaced ones get theirs; a message on the logger
            `attemper` says once how many are left out.
        name: of the tracker, for that message.
    """

    def __init__(self, most: int, name: str) -> None:
        self.most, self.name = most, name
        self._tags: dict[str, str | None] = {}  # the name of a layer -> its part of a tag; None: it is left out

    def scalars(self, record: StepRecord) -> dict[str, float]:
        """The scalars of that step, as Python floats."""
        found = _of_the_model(record)
        for name, value in record.scalars.items():
            found["watch/" + "/".join(_tag(part) for part in name.split("/") if part)] = float(value)
        self._choose(record.layers, self.most - len(found))
        for layer in record.layers:
            tag = self._tags[layer.name]
            if tag is not None:
                for figure in SCALARS:
                    found[f"attention/{tag}/{figure.name}"] = worst_of(layer.figure(figure.name), figure.worst)
                for figure in _MEANS:
                    found[f"attention/{tag}/mean_{figure.name}"] = float(finite(layer.figure(figure.name)).mean())
        return {tag: value for tag, value in found.items() if math.isfinite(value)}

    def _choose(self, layers: tuple[LayerRecord, ...], room: int) -> None:
        """Give a tag to layers that are new, as long as there is room; of those that come together, evenly spaced ones."""
        new = [layer for layer in layers if layer.name not in self._tags]
        if not new:
            return
        taken = {tag for tag in self._tags.values() if tag is not None}
        places = min(len(new), max(room // _OF_A_LAYER - len(taken), 0))
        # The first and the last are among them.
        chosen = {round(place * (len(new) - 1) / max(places - 1, 1)) for place in range(places)}
        for place, layer in enumerate(new):
            tag = None
            if place in chosen:
                tag = _unlike(_tag(layer.layer) + (f"-call{layer.call}" if layer.call else ""), taken)
                taken.add(tag)
            self._tags[layer.name] = tag
        if len(chosen) < len(new):
            _LOGGER.warning(
                "%s: %d of %d layers have scalars of their own (most=%d); attention/FIGURE is over all, and files have all",
                *(self.name, len(taken), len(self._tags), self.most),
            )


def headline(record: StepRecord) -> dict[str, float]:
    """Those scalars alone that are of the whole model: `attention/FIGURE`, `attention/nonfinite_rows`, `attention/alarms`."""
    return {tag: value for tag, value in _of_the_model(record).items() if math.isfinite(value)}


def finite(values: Tensor) -> Tensor:
    """Those that are neither infinite nor NaN."""
    return values[torch.isfinite(values)]


def worst_of(values: Tensor, end: str) -> float:
    """The largest or the smallest of those that are finite; NaN if none is."""
    values = finite(values)
    if len(values) == 0:
        return math.nan
    return float(values.max() if end == "max" else values.min())


def text_of(alarm: Alarm) -> str:
    """An alarm in one line."""
    return f"step {alarm.step}: {alarm.code} {alarm.severity}: {alarm.message}"


def _of_the_model(record: StepRecord) -> dict[str, float]:
    found = {"attention/alarms": float(len(record.alarms))}
    found["attention/nonfinite_rows"] = float(sum(int(layer.stats.nonfinite_rows.sum()) for layer in record.layers))
    if record.layers:
        for figure in SCALARS:
            values = torch.cat([layer.figure(figure.name) for layer in record.layers])
            found[f"attention/{figure.name}"] = worst_of(values, figure.worst)
    return found


def _tag(name: str) -> str:
    """A name as a part of a tag: without slashes, and not a place in a file system."""
    tag = _NOT_IN_A_TAG.sub("_", name) or "model"
    return tag if tag.strip(".") else tag.replace(".", "_")


def _unlike(tag: str, taken: set[str]) -> str:
    number, unlike = 2, tag
    while unlike in taken:
        unlike, number = f"{tag}-{number}", number + 1
    return unlike
