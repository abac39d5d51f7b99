"""How weights change: AdamW, SGD or Muon, with warm-up, decay, muP's rates by width, and QK-clip behind each step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from attemper.lab.config import RunConfig

MUP_WIDTH = 64  # where muP's rates are those of the configuration
BETAS = (0.9, 0.95)
MOMENTUM = 0.9
OUTPUT = "head.weight"  # of every model: hidden states to logits of classes or bytes
LOWEST = 0.05  # of the rate, at the end of a cosine


class Optimisers:
    """One optimiser, or Muon for the blocks' matrices and AdamW for the rest, under one schedule."""

    def __init__(self, model: nn.Module, config: RunConfig) -> None:
        self._config = config
        dials, decay = config.optimiser, config.optimiser.weight_decay
        slower = MUP_WIDTH / config.model.width if config.model.init == "mup" else 1.0
        groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                hidden = is_hidden_matrix(name, parameter)
                factor = slower if hidden or name == OUTPUT else 1.0
                groups.setdefault((dials.name == "muon" and hidden, factor), []).append(parameter)
        by_muon, others = (
            [{"params": group, "factor": factor} for (muon, factor), group in groups.items() if muon == which]
            for which in (True, False)
        )
        self.all: list[torch.optim.Optimizer]
        if dials.name == "adamw":
            self.all = [torch.optim.AdamW(others, betas=BETAS, weight_decay=decay)]
        elif dials.name == "sgd":
            self.all = [torch.optim.SGD(others, lr=1.0, momentum=MOMENTUM, weight_decay=decay)]
        else:
            self.all = [
                torch.optim.Muon(by_muon, weight_decay=decay),
                torch.optim.AdamW(others, betas=BETAS, weight_decay=decay),
            ]

    def set_rate(self, step: int) -> float:
        """Set the learning rate of a step, and return it."""
        rate = self._config.optimiser.learning_rate * share_of_rate(step, self._config)
        for optimiser in self.all:
            for group in optimiser.param_groups:
                group["lr"] = rate * group["factor"]
        return rate

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for optimiser in self.all:
            optimiser.zero_grad()

    def state(self) -> list[dict[str, Any]]:
        """The state of each, by `state_dict`."""
        return [optimiser.state_dict() for optimiser in self.all]

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        """The inverse of `state`."""
        for optimiser, state in zip(self.all, states, strict=True):
            optimiser.load_state_dict(state)


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether it maps hidden states to hidden states: a matrix of a block."""
    return parameter.ndim == 2 and any(part in name for part in ("blocks.", "encoder.", "decoder."))


def share_of_rate(step: int, config: RunConfig) -> float:
    """The share of the highest learning rate that a step uses: linear warm-up, then constant or a cosine to a twentieth."""
    warmup = config.optimiser.warmup
    if step < warmup:
        return (step + 1) / warmup
    if config.optimiser.decay == "none":
        return 1.0
    done = (step - warmup) / max(1, config.steps - warmup)
    return LOWEST + (1 - LOWEST) * 0.5 * (1 + math.cos(math.pi * done))
