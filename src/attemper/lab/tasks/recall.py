"""Associative recall: a key is given again, and the value that stood behind it is to be told."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attemper.lab.tasks.drawing import ENOUGH, HeldOut
from attemper.lab.tasks.task import IGNORED, Batch


class Recall:
    """key value key value … key: what is the value of the last key, and of every key that comes again?

    The distribution: for each example a table gives each of the S keys one of S values, uniformly and independently; `length`
    keys are drawn uniformly, with replacement, each followed by its value of the table; the last key is that of a pair drawn
    uniformly. Scored are the positions of keys seen before, the last one always. Their values are known from what was read: the
    best loss is 0 nats, and guessing gives ln S. Keys are tokens 0 … S − 1, values S … 2S − 1, classes the values.

    Args:
        length: pairs. symbols: S.

    Raises:
        ArgumentError: there are too few sequences to hold any out.
    """

    optimum: float | None = 0.0

    def __init__(self, length: int, symbols: int) -> None:
        self._symbols = symbols
        self.classes, self.vocabulary, self.tokens = symbols, 2 * symbols, 2 * length + 1
        self.data = f"recall of {length} pairs of {symbols} keys, drawn"
        # Of keys alone and one value: a lower bound of what the tables add to.
        self._held_out = HeldOut(self._draw, length, symbols ** min(length + 1, ENOUGH))

    def batch(self, size: int, generator: torch.Generator) -> Batch:
        """Sequences that are not held out."""
        return self._batch(self._held_out.others(size, generator))

    def validation(self, length: int | None = None) -> Sequence[Batch]:
        """256 fixed sequences; of another length others, drawn with a seed of their own."""
        return [self._batch(self._held_out.sequences(length))]

    def _draw(self, size: int, pairs: int, generator: torch.Generator) -> Tensor:
        table = torch.randint(self._symbols, (size, self._symbols), generator=generator)
        keys = torch.randint(self._symbols, (size, pairs), generator=generator)
        asked = torch.randint(pairs, (size, 1), generator=generator)
        values = table.gather(1, keys) + self._symbols
        return torch.cat([torch.stack([keys, values], -1).flatten(1), keys.gather(1, asked)], 1)

    def _batch(self, tokens: Tensor) -> Batch:
        keys = tokens[:, ::2]
        same = (keys.unsqueeze(2) == keys.unsqueeze(1)).tril(-1)
        seen = same.any(2)
        # The value of the first place where the key stood; its column is one to the right of the key's.
        first = same.int().argmax(2)
        values = tokens[:, 1::2].gather(1, first.clamp(max=tokens.shape[1] // 2 - 1)) - self._symbols
        targets = torch.full_like(tokens, IGNORED)
        targets[:, ::2] = torch.where(seen, values, IGNORED)
        return Batch({"tokens": tokens}, targets)
