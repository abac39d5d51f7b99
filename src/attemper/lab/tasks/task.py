"""What every task gives: batches to learn from, fixed batches to be judged by, and what is known of the best that can be had."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

IGNORED = -100  # a target that is not scored, as in `F.cross_entropy`


class Batch(NamedTuple):
    """Examples. The model is called with `inputs` as keywords and gives [batch, scored positions, classes].

    Attributes:
        inputs: "tokens" int64 [batch, tokens] for text and recall, "images" float32 [batch, 8, 8] for digits, "source" and
            "target" int64 [batch, symbols] for reversal.
        targets: int64, the right classes, `IGNORED` where nothing is scored.
    """

    inputs: dict[str, Tensor]
    targets: Tensor


class Task(Protocol):
    """A task.

    Attributes:
        classes: of the output. vocabulary: of the input tokens, 0 where there are none. tokens: longest input, in positions.
        optimum: the lowest validation loss that can be had, in nats a scored position, where it is known.
        data: what it was made from, for the record: a name with its sha256.
    """

    classes: int
    vocabulary: int
    tokens: int
    optimum: float | None
    data: str

    def batch(self, size: int, generator: torch.Generator) -> Batch:
        """Examples to learn from; the same generator gives the same ones."""
        ...

    def validation(self, length: int | None = None) -> Sequence[Batch]:
        """The held-out examples, the same at every call; `length`: of the examples, instead of that of the training."""
        ...
