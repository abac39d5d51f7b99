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


class HeldOut:
    """A fixed set of sequences, and the draw of others.

    Args:
        draw: gives int64 [size, length] from (size, generator).
        different: how many sequences it can give.

    Raises:
        ArgumentError: too few for a part of them to be held out.
    """

    def __init__(self, draw: Callable[[int, torch.Generator], Tensor], different: int) -> None:
        if different < _FEWEST:
            expected = f"at least {_FEWEST}, so that {HELD_OUT} can be held out; raise task.length or task.symbols"
            raise ArgumentError("task", f"{different} different sequences", expected)
        self._draw = draw
        self.sequences = draw(HELD_OUT, torch.Generator().manual_seed(_SEED))
        self._known = _digest(self.sequences)

    def others(self, size: int, generator: torch.Generator) -> Tensor:
        """Sequences none of which is held out, [size, length]."""
        drawn = self._draw(size, generator)
        while (again := torch.isin(_digest(drawn), self._known)).any():
            drawn[again] = self._draw(int(again.sum()), generator)
        return drawn


def _digest(sequences: Tensor) -> Tensor:
    """A number for each, the same for equal ones; int64 arithmetic wraps, which is meant."""
    digest = torch.zeros(len(sequences), dtype=torch.int64)
    for column in sequences.unbind(1):
        digest = digest * 6364136223846793005 + column + 1442695040888963407
    return digest
