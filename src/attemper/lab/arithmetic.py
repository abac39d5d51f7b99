"""In what a run computes: autocast to 16 bits, and a factor on the loss that keeps small gradients from vanishing there."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from attemper.lab.config import Precision

GROWTH = 200  # steps without an overflow after which a dynamic factor doubles
FIRST = 2.0**16


def autocast(precision: Precision, device: str = "cpu") -> AbstractContextManager[object]:
    """Matrix products in the 16-bit type of the configuration, their results rounded to it; nothing for "fp32"."""
    dtype = torch.bfloat16 if precision.arithmetic.startswith("bf16") else torch.float16
    return torch.autocast(device, dtype=dtype, enabled=precision.arithmetic != "fp32")


class LossScale:
    """A factor on the loss, taken off the gradients before they are used: constant, or halved at every overflow."""

    def __init__(self, precision: Precision) -> None:
        self.dynamic = precision.loss_scale == "dynamic"
        self.factor = FIRST if precision.loss_scale == "dynamic" else float(precision.loss_scale)
        self.clean = 0  # steps since the last overflow

    def take_off(self, gradients: list[Tensor]) -> bool:
        """Divide the gradients by the factor; whether the step may be taken: not if it is dynamic, and one is no number."""
        if self.factor != 1.0:
            for gradient in gradients:
                gradient.div_(self.factor)
        if not self.dynamic:
            return True
        if all(bool(gradient.isfinite().all()) for gradient in gradients):
            self.clean += 1
            if self.clean == GROWTH:
                self.factor, self.clean = 2 * self.factor, 0
            return True
        self.factor, self.clean = self.factor / 2, 0
        return False
