"""What is measured: shapes, dtypes and masks."""

from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LONG = 256  # queries from which a shape counts as a long one


class Shape(NamedTuple):
    """Sizes of one attention."""

    batch: int
    heads: int
    queries: int
    keys: int
    width: int

    @property
    def name(self) -> str:
        """What `--shapes` calls it."""
        return f"{self.queries}x{self.width}" if self.queries == self.keys else f"{self.queries}x{self.keys}x{self.width}"

    @property
    def is_decode(self) -> bool:
        """One query, as when a text is continued: reading keys and values sets the pace."""
        return self.queries == 1

    @property
    def is_long(self) -> bool:
        """Long enough that products set the pace, not what comes with a call."""
        return self.queries >= LONG

    def at_most(self, length: int) -> "Shape":
        """The same with no more queries and keys than that; one query stays with all its keys."""
        return self if self.queries <= length else self._replace(queries=length, keys=min(self.keys, length))

    def operations(self, *, causal: bool) -> float:
        """Operations of the two products, a multiply-add being two; half of them are hidden by the causal rule."""
        return 4.0 * self.batch * self.heads * self.queries * self.keys * self.width / (2 if causal else 1)

    def __str__(self) -> str:
        return ", ".join(map(str, self))


class Setting(NamedTuple):
    """One line of a table."""

    shape: Shape
    dtype: str
    causal: bool
    threads: int

    def __str__(self) -> str:
        return f"({self.shape}) {self.dtype} {mask_name(self.causal)}, {on_threads(self.threads)}"


SHAPES = (
    Shape(1, 8, 2048, 2048, 128),
    Shape(1, 4, 4096, 4096, 64),
    Shape(8, 12, 128, 128, 64),
    Shape(1, 32, 1, 4096, 128),
    Shape(1, 8, 2048, 2048, 80),
    Shape(1, 8, 2048, 2048, 32),  # for the cost of the statistics, which is dearest in narrow heads
)
VARIANT_SHAPES = ("4096x64", "2048x128")
PEER_SHAPES = ("4096x64", "2048x128")
TINY = Shape(1, 1, 16, 16, 64)

# The same kinds, so small that a smoke run is over in seconds.
QUICK_SHAPES = (
    Shape(1, 2, 257, 257, 64),
    Shape(2, 3, 24, 24, 64),
    Shape(1, 2, 1, 131, 64),
    Shape(1, 2, 67, 67, 32),
)


def mask_name(causal: bool) -> str:
    """As the tables write it."""
    return "causal" if causal else "full"


def on_threads(count: int) -> str:
    """As the tables write it."""
    return f"{count} thread{'' if count == 1 else 's'}"


def masks(shape: Shape) -> tuple[bool, ...]:
    """Whether to measure a shape full, causal or both: to a single query causal says nothing."""
    return (False,) if shape.is_decode else (False, True)


def tensors(shape: Shape, dtype: torch.dtype, *, gradients: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, normally distributed, always the same."""
    batch, heads, queries, keys, width = shape
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(batch, heads, length, width, generator=generator).to(dtype).requires_grad_(gradients)
        for length in (queries, keys, keys)
    )
    return query, key, value
