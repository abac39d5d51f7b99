"""What a scale rule is: the factor that multiplies q·k, as a function of the call's shape."""

import copy
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from attemper.errors import ArgumentError


class LogitShape(NamedTuple):
    """What a rule may depend on: the shape of one call's logits.

    Attributes:
        head_dim: width of q and k; heads: number of query heads; queries, keys: how many of each.
        offset: position of query 0 among the keys, as in `attemper.attention`.
        layer: number of the layer, from 0; None where it is not known.
        device: where a factor that is a tensor is wanted; None: torch's default. Learned rules answer on their own device.
    """

    head_dim: int
    heads: int
    queries: int
    keys: int
    offset: int = 0
    layer: int | None = None
    device: torch.device | None = None


class Scale(ABC):
    """A scale rule: logits are factor · q·k.

    Fixed rules are frozen dataclasses; learned ones are also `torch.nn.Module`s, so that a model which holds one trains it.
    Rules multiply by nesting: most take a `base`, the rule that theirs goes on top of.
    """

    @abstractmethod
    def factor(self, shape: LogitShape) -> float | Tensor:
        """The number that multiplies q·k.

        Returns:
            A float, or a float32 tensor: 0-d, [heads], or one that broadcasts to [batch, heads, queries].

        Raises:
            ArgumentError: the rule needs the layer and `shape.layer` is None, or was made for another number of heads.
        """

    def logit_variance(self, shape: LogitShape) -> float:
        """The expected variance of factor · q·k at initialisation, over all heads, queries and keys.

        factor²·d for entries of q and k that are independent with mean 0 and variance 1; factor²/d for a rule with
        `unit_operands`, whose q and k are divided by their lengths first. Averaged where the factor differs by head or query.
        """
        factor = self.factor(shape)
        square = torch.as_tensor(factor, device="cpu", dtype=torch.float64).detach().square().mean().item()
        return square / shape.head_dim if self.unit_operands else square * shape.head_dim

    @property
    def unit_operands(self) -> bool:
        """Whether the rule is meant for q and k that were divided by their lengths; nothing here divides them."""
        return False

    @property
    def depends_on_position(self) -> bool:
        """Whether the factor differs by query or with the number of keys: such a rule cannot be folded into weights."""
        return False

    def at(self, layer: int) -> "Scale":
        """The rule with its layer bound (from 0): itself, unless it depends on the layer. Parameters stay shared.

        A rule of yours that reads `shape.layer` overrides this.
        """
        return self


class OnBase(Scale):
    """A rule on top of another."""

    @property
    @abstractmethod
    def base(self) -> Scale:
        """The rule below, one without parameters: a field in fixed rules, an attribute in learned ones."""

    @property
    def unit_operands(self) -> bool:
        """That of the base."""
        return self.base.unit_operands

    @property
    def depends_on_position(self) -> bool:
        """That of the base."""
        return self.base.depends_on_position

    def at(self, layer: int) -> Scale:
        """The rule with the layer of its base bound (from 0); parameters stay shared."""
        base = self.base.at(layer)
        if base is self.base:
            return self
        bound = copy.copy(self)  # of a module too: the copy holds the same parameters
        object.__setattr__(bound, "base", base)  # dataclasses are frozen
        return bound


def product(one: float | Tensor, other: float | Tensor) -> float | Tensor:
    """Two factors multiplied, in which a 1-D tensor is one factor a head; in the wider dtype, also where that is 0-d."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        dtype = torch.promote_types(one.dtype, other.dtype)
        one, other = (each.to(dtype) if each.ndim != 1 else each.to(dtype).unsqueeze(-1) for each in (one, other))
    return one * other


def positions(shape: LogitShape) -> Tensor:
    """The queries' positions among the keys, int64 [1, queries]: 2-D, because a 1-D factor is one a head."""
    return torch.arange(shape.queries, device=shape.device).unsqueeze(0) + shape.offset


def layer_of(shape: LogitShape, rule: object) -> int:
    """The layer of the call."""
    if shape.layer is None:
        expected = f"the layer's number, which {type(rule).__name__} needs: bind it with rule.at(layer)"
        raise ArgumentError("layer", None, expected)
    return shape.layer
