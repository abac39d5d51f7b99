"""A run as curves: for each layer the figures of its heads over the logged steps, as tensors, out of the columns of `Run`."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Self

import torch
from torch import Tensor

from attemper.errors import ArgumentError
from attemper.monitor.records import BY_NAME, Alarm, Run, RunInfo
from attemper.report.layout import listed
from attemper.report.names import safe
from attemper.stats.numbers import to_json

SHOWN = ("max_scaled_product", "max_logit", "normalized_entropy", "entropy", "gain", "saturated_share", "nonfinite_rows")


@dataclass(frozen=True, eq=False)
class LayerCurves:
    """One layer, or one of its calls, over the logged steps.

    Attributes:
        layer, call: as in `LayerRecord`. heads: how many.
        figures: float64 [steps, heads] by name, of `SHOWN`; NaN where there is no number.
    """

    layer: str
    call: int
    heads: int
    figures: dict[str, Tensor]

    @property
    def name(self) -> str:
        """The layer, with the call behind it where it is not the first."""
        return f"{self.layer}#{self.call}" if self.call else self.layer

    def worst(self, figure: str) -> tuple[Tensor, Tensor]:
        """(value, head) over the heads at each step, [steps]: the end that is worth a look; NaN where there is none."""
        sign = 1.0 if BY_NAME[figure].worst == "max" else -1.0
        values = self.figures[figure]
        ordered = torch.where(values.isnan(), -math.inf, sign * values)
        found, heads = ordered.max(-1)
        return torch.where(values.isnan().all(-1), math.nan, sign * found), heads

    def all_nan(self) -> Tensor:
        """bool [steps, heads]: there were rows, and not one logit that is a number. The largest of none is −inf, which reads as
        harmless.
        """
        return (self.figures["max_logit"] == -math.inf) & (self.figures["nonfinite_rows"] > 0)

    def mean(self, figure: str) -> Tensor:
        """Mean over the heads that have a number, [steps]."""
        return self.figures[figure].nanmean(-1)


@dataclass(frozen=True, eq=False)
class RunView:
    """A run, or the last steps of one.

    Attributes:
        info: what was known as it began. steps: those that were logged, rising. layers: in the model's order.
        scalars: float64 [steps] by name; NaN where a step has none. alarms: in order of step.
        attempt: how often training went back.
        latest: each scalar at the last step that had it; NaN where it was NaN there, which `scalars` does not tell from none.
    """

    info: RunInfo
    steps: tuple[int, ...]
    layers: tuple[LayerCurves, ...]
    scalars: dict[str, Tensor]
    alarms: tuple[Alarm, ...]
    attempt: int = 0
    latest: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Run) -> Self:
        """The curves of what was read."""
        steps = tuple(sorted(run.scalars))
        at = {step: number for number, step in enumerate(steps)}
        columns = run.columns
        rows: dict[tuple[str, int], list[int]] = {}
        for row, place in enumerate(zip(columns["layer"], columns["call"], strict=True)):
            rows.setdefault(place, []).append(row)
        where = torch.tensor([at[step] for step in columns["step"]], dtype=torch.int64)
        head = torch.tensor(columns["head"], dtype=torch.int64)
        values = {name: torch.tensor([_number(x) for x in columns[name]], dtype=torch.float64) for name in SHOWN}
        layers = []
        for (layer, call), numbers in rows.items():
            index = torch.tensor(numbers)
            heads = int(head[index].max()) + 1
            figures = {}
            for name, value in values.items():
                figures[name] = torch.full((len(steps), heads), math.nan, dtype=torch.float64)
                figures[name][where[index], head[index]] = value[index]
            layers.append(LayerCurves(layer, call, heads, figures))
        names = dict.fromkeys(name for scalars in run.scalars.values() for name in scalars)
        scalars = {
            name: torch.tensor([run.scalars[step].get(name, math.nan) for step in steps], dtype=torch.float64) for name in names
        }
        latest = {name: value for step in steps for name, value in run.scalars[step].items()}
        return cls(run.info, steps, tuple(layers), scalars, run.alarms, run.attempt, latest)

    def then(self, later: "RunView", most: int) -> "RunView":
        """This view with later steps behind it, the last `most` of them all, with their alarms."""
        steps = (self.steps + later.steps)[-most:]
        mine, its = ({(layer.layer, layer.call): layer for layer in view.layers} for view in (self, later))
        layers = [
            _joined(mine.get(place), its.get(place), len(self.steps), len(later.steps), most)
            for place in dict.fromkeys([*mine, *its])
        ]
        scalars = {}
        for name in dict.fromkeys([*self.scalars, *later.scalars]):
            parts = [
                view.scalars.get(name, torch.full((len(view.steps),), math.nan, dtype=torch.float64)) for view in (self, later)
            ]
            scalars[name] = torch.cat(parts)[-most:]
        latest = self.latest | later.latest
        alarms = tuple(alarm for alarm in self.alarms + later.alarms if alarm.step >= min(steps, default=0))
        return RunView(later.info, steps, tuple(layers), scalars, alarms, later.attempt, latest)

    def only(self, globs: Iterable[str]) -> "RunView":
        """The layers whose whole name one of the globs fits; all if there is none.

        Raises:
            ArgumentError: they fit no layer.
        """
        wanted = list(globs)
        if not wanted:
            return self

        def fits(layer: str) -> bool:
            return any(fnmatchcase(layer, glob) for glob in wanted)

        layers = tuple(each for each in self.layers if fits(each.layer))
        if self.layers and not layers:
            names = listed([safe(name) for name in dict.fromkeys(each.layer for each in self.layers)])
            raise ArgumentError("layers", ", ".join(map(repr, wanted)), f"a glob that fits one of {names}")
        return replace(self, layers=layers, alarms=tuple(each for each in self.alarms if fits(each.layer)))

    def to_dict(self) -> dict[str, Any]:
        """The last logged step, head by head, its scalars, and all alarms, JSON-ready: "inf" and "-inf", null for no number."""

        def last(values: Tensor) -> Any:
            return [to_json(value) for value in values[-1:].flatten().tolist()]

        return {
            "run": asdict(self.info),
            "steps": {"first": self.steps[0], "last": self.steps[-1], "logged": len(self.steps)} if self.steps else None,
            "attempt": self.attempt,
            "scalars": {name: next(iter(last(values)), None) for name, values in self.scalars.items()},
            "layers": [
                {"layer": each.layer, "call": each.call, "figures": {name: last(each.figures[name]) for name in SHOWN}}
                for each in self.layers
            ],
            "alarms": [{name: to_json(value) for name, value in asdict(alarm).items()} for alarm in self.alarms],
        }


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _joined(mine: LayerCurves | None, its: LayerCurves | None, before: int, after: int, most: int) -> LayerCurves:
    """One layer over both; a model may have grown a layer, lost one, or changed its number of heads."""
    present = [each for each in (mine, its) if each is not None]
    heads = max(each.heads for each in present)
    figures = {}
    for name in SHOWN:
        parts = []
        for each, steps in ((mine, before), (its, after)):
            part = torch.full((steps, heads), math.nan, dtype=torch.float64)
            if each is not None:
                part[:, : each.heads] = each.figures[name]
            parts.append(part)
        figures[name] = torch.cat(parts)[-most:]
    return LayerCurves(present[-1].layer, present[-1].call, heads, figures)
