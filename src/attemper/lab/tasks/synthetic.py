"""Two tasks whose best possible loss is known: associative recall, and a sequence backwards."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attemper.lab.tasks.task import IGNORED, Batch

VALIDATION_SEED = 20_170_612  # of the held-out examples, which no training seed reaches: see `batch`
VALIDATION_EXAMPLES = 256


class _Synthetic:
    """Examples from a generator; held-out ones from one of their own."""

    optimum: float | None = 0.0
    symbols: int
    tokens: int

    def make(self, size: int, length: int, generator: torch.Generator) -> Batch:
        raise NotImplementedError

    def validation(self, length: int | None = None) -> Sequence[Batch]:
        """Examples of a seed of their own; drawn as those of the training, from so many that none is likely to be among them."""
        generator = torch.Generator().manual_seed(VALIDATION_SEED)
        return [self.make(VALIDATION_EXAMPLES, self.default_length if length is None else length, generator)]

    def batch(self, size: int, generator: torch.Generator) -> Batch:
        """New examples at every call."""
        return self.make(size, self.default_length, generator)

    default_length: int


class Recall(_Synthetic):
    """k₁ v₁ k₂ v₂ … k_n v_n, then one of the keys: which value came with it?

    Keys are different symbols, drawn without replacement where there are enough, else only the last value of a repeated key
    counts; values are drawn with replacement. The last position alone is scored. Best loss: 0, since the answer is in view.
    """

    def __init__(self, symbols: int, pairs: int) -> None:
        self.symbols, self.default_length = symbols, pairs
        self.vocabulary, self.classes, self.tokens = 2 * symbols, symbols, 2 * pairs + 1
        self.data = f"associative recall, {symbols} keys and {symbols} values, {pairs} pairs"

    def make(self, size: int, length: int, generator: torch.Generator) -> Batch:
        """Examples with `length` pairs."""
        if length <= self.symbols:
            keys = torch.rand(size, self.symbols, generator=generator).argsort(-1)[:, :length]
        else:
            keys = torch.randint(self.symbols, (size, length), generator=generator)
        values = torch.randint(self.symbols, (size, length), generator=generator)
        asked = torch.randint(length, (size, 1), generator=generator)
        query = keys.gather(1, asked)
        last = length - 1 - (keys == query).flip(1).int().argmax(1, keepdim=True)
        pairs = torch.stack((keys, values + self.symbols), -1).flatten(1)
        targets = torch.full((size, 2 * length + 1), IGNORED)
        targets[:, -1:] = values.gather(1, last)
        return Batch({"tokens": torch.cat((pairs, query), 1)}, targets)


class Reversal(_Synthetic):
    """Symbols drawn with replacement; the decoder is to give them backwards, and is shown each right one after it was asked for.

    Best loss: 0.
    """

    def __init__(self, symbols: int, length: int) -> None:
        self.symbols, self.default_length, self.tokens = symbols, length, length
        self.vocabulary, self.classes = symbols + 1, symbols  # one more to begin with
        self.data = f"reversal, {symbols} symbols, length {length}"

    def make(self, size: int, length: int, generator: torch.Generator) -> Batch:
        """Examples of `length` symbols."""
        source = torch.randint(self.symbols, (size, length), generator=generator)
        backwards = source.flip(1)
        begin = torch.full((size, 1), self.symbols)
        return Batch({"source": source, "target": torch.cat((begin, backwards[:, :-1]), 1)}, backwards)
