"""The curves of a run while they grow: rows of numbers, kept as tensors so that a checkpoint can hold them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attemper.lab.store.curves import EACH_STEP, NAMES
from attemper.monitor.records import StepRecord

EACH_LOG = ("steps", "figures", "q_gradient", "k_gradient")


class Recorder:
    """What is appended to at each step, and, where the watch made a record, at that.

    Args:
        layers: names of the attention layers.
        order: of the heads of each of them, where they stand when the calls of a layer are laid end to end: heads of another
            width are in a call of their own.
    """

    def __init__(self, layers: tuple[str, ...], order: Sequence[int]) -> None:
        self.layers, self.heads, self._order = layers, len(order), list(order)
        self._steps: list[tuple[float, ...]] = []
        self._logs: list[tuple[int, Tensor, Tensor, Tensor]] = []

    def step(self, loss: float, gradient_norm: float, learning_rate: float, loss_scale: float) -> None:
        """One step of the training."""
        self._steps.append((loss, gradient_norm, learning_rate, loss_scale))

    def log(self, record: StepRecord, q_gradient: Tensor, k_gradient: Tensor) -> None:
        """The statistics of one step, and the gradients' norms, each [layers]."""
        figures = torch.full((len(NAMES), len(self.layers), self.heads), torch.nan, dtype=torch.float64)
        parts: dict[str, list[Tensor]] = {}
        for layer in record.layers:
            parts.setdefault(layer.layer, []).append(torch.stack([layer.figure(name).double().cpu() for name in NAMES]))
        for place, name in enumerate(self.layers):
            if name in parts:
                figures[:, place] = torch.cat(parts[name], 1)[:, self._order]
        self._logs.append((record.step, figures, q_gradient.double(), k_gradient.double()))

    def tensors(self) -> dict[str, Tensor]:
        """Everything so far."""
        steps = torch.tensor(self._steps, dtype=torch.float64).reshape(-1, len(EACH_STEP))
        found = {name: steps[:, column] for column, name in enumerate(EACH_STEP)}
        found["steps"] = torch.tensor([log[0] for log in self._logs], dtype=torch.int64)
        empty = (torch.empty(0, len(NAMES), len(self.layers), self.heads), torch.empty(0, len(self.layers)))
        for column, name in enumerate(EACH_LOG[1:]):
            rows = [log[1:][column] for log in self._logs]
            found[name] = torch.stack(rows) if rows else empty[min(column, 1)].double()
        return found

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Go on from what `tensors` gave."""
        self._steps = [tuple(row) for row in torch.stack([tensors[name] for name in EACH_STEP], 1).tolist()]
        rows = zip(*(tensors[name] for name in EACH_LOG), strict=True)
        self._logs = [(int(step), figures, q, k) for step, figures, q, k in rows]
