"""Random sequences of which some are held out: what is learned from is drawn until none of those is among it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attemper.errors import ArgumentError

HELD_OUT = 256
_SEED = 20170612
# So many different sequences there must be: of much fewer the held-out ones would be a large part.
_FEWEST = 2**16
ENOUGH = 16  # tokens of two kinds: from here on there are so many sequences, and more need not be counted


class HeldOut:
    """A fixed set of sequences, and the draw of others.

    Args:
        draw: gives int64 [size, tokens] from (size, length, generator).
        length: of the sequences that are held out.
        different: how many sequences of that length it can give, at least.

    Raises:
        ArgumentError: too few for a part of them to be held out.
    """

    def __init__(self, draw: Callable[[int, int, torch.Generator], Tensor], length: int, different: int) -> None:
        if different < _FEWEST:
            expected = f"at least {_FEWEST}, so that {HELD_OUT} can be held out; raise task.length or task.symbols"
            raise ArgumentError("task", f"{different} different sequences", expected)
        self._draw, self._length = draw, length
        self._sequences = draw(HELD_OUT, length, torch.Generator().manual_seed(_SEED))
        self._known = _digest(self._sequences)

    def sequences(self, length: int | None = None) -> Tensor:
        """Those that are held out; of another length others, drawn with a seed of their own."""
        if length is None or length == self._length:
            return self._sequences
        return self._draw(HELD_OUT, length, torch.Generator().manual_seed(length))

    def others(self, size: int, generator: torch.Generator) -> Tensor:
        """Sequences none of which is held out, [size, length]."""
        drawn = self._draw(size, self._length, generator)
        while (again := torch.isin(_digest(drawn), self._known)).any():
            drawn[again] = self._draw(int(again.sum()), self._length, generator)
        return drawn


def _digest(sequences: Tensor) -> Tensor:
    """A number for each, the same for equal ones; int64 arithmetic wraps, which is meant."""
    digest = torch.zeros(len(sequences), dtype=torch.int64)
    for column in sequences.unbind(1):
        digest = digest * 6364136223846793005 + column + 1442695040888963407
    return digest
