"""Reversal: a sequence is to be written backwards, by a decoder that looks at what an encoder made of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attemper.lab.tasks.drawing import ENOUGH, HeldOut
from attemper.lab.tasks.task import Batch


class Reversal:
    """Symbols drawn uniformly and independently; the decoder is given what it should have written so far.

    "source" is the sequence, "target" begins with a token of its own and goes on with all but the last of the reversed symbols.
    The best loss is 0 nats, guessing gives ln of the number of symbols.

    Args:
        length: of a sequence. symbols: how many different ones.

    Raises:
        ArgumentError: there are too few sequences to hold any out.
    """

    optimum: float | None = 0.0

    def __init__(self, length: int, symbols: int) -> None:
        self.classes, self.vocabulary, self.tokens = symbols, symbols + 1, length
        self.data = f"reversal of {length} of {symbols} symbols, drawn"
        self._held_out = HeldOut(self._draw, length, symbols ** min(length, ENOUGH))

    def batch(self, size: int, generator: torch.Generator) -> Batch:
        """Sequences that are not held out."""
        return self._batch(self._held_out.others(size, generator))

    def validation(self, length: int | None = None) -> Sequence[Batch]:
        """256 fixed sequences; of another length others, drawn with a seed of their own."""
        return [self._batch(self._held_out.sequences(length))]

    def _draw(self, size: int, length: int, generator: torch.Generator) -> Tensor:
        return torch.randint(self.classes, (size, length), generator=generator)

    def _batch(self, source: Tensor) -> Batch:
        backwards = source.flip(1)
        start = torch.full_like(source[:, :1], self.classes)
        return Batch({"source": source, "target": torch.cat([start, backwards[:, :-1]], 1)}, backwards)
