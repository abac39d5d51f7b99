"""Where the heads of q and k lie in the parameters of one attention module: data, without a word about any model."""

from dataclasses import dataclass

import torch
from torch import Tensor

from attemper.errors import ArgumentError


@dataclass(frozen=True, eq=False)
class Heads:
    """Where the heads of q, or of k, lie: multiplying these numbers multiplies the operand itself.

    Attributes:
        parameters: names within the attention module, such as ("q_proj.weight", "q_proj.bias").
        features: int64 [heads, d], which outputs of the projection make each head, in any order that the model uses; [1, d] where
            all heads share them, as they share the gain of a norm over d numbers.
        dim: the dimension of a matrix along which its outputs lie: 0 in nn.Linear, 1 in GPT-2's Conv1D. None: the parameter is
            a gain, and features count its numbers.
        offset: what the model adds to the first parameter before it uses it: 1.0 for norms that multiply by 1 + w.

    Raises:
        ArgumentError: features are no int64 matrix, count from below 0, or name an output twice; no parameter is named.
    """

    parameters: tuple[str, ...]
    features: Tensor
    dim: int | None = 0
    offset: float = 0.0

    def __post_init__(self) -> None:
        if not self.parameters:
            raise ArgumentError("parameters", self.parameters, 'names within the attention module, such as ("q_proj.weight",)')
        if self.features.ndim != 2 or self.features.dtype != torch.int64 or self.features.numel() == 0:
            given = f"{str(self.features.dtype).removeprefix('torch.')} {list(self.features.shape)}"
            raise ArgumentError("features", given, "an int64 tensor [heads, d] of the outputs that make each head")
        if self.features.min() < 0 or self.features.unique().numel() != self.features.numel():
            raise ArgumentError("features", self.features.tolist(), "every output once, counted from 0")
        if self.dim not in (0, 1, None):
            raise ArgumentError("dim", self.dim, "0 (nn.Linear), 1 (Conv1D) or None (a gain)")

    @property
    def count(self) -> int:
        """How many heads are told apart; 1 where all share."""
        return self.features.shape[0]


@dataclass(frozen=True, eq=False)
class Projections:
    """Where q and k of one attention module are made: in their projections, or in the gains of the norms behind these.

    Of a fused projection, both name the same parameter and other features of it. The head h of q reads the key head
    h // (heads / key heads).

    Attributes:
        query: where the heads of q lie.
        key: where those of k lie; None where k cannot be scaled alone: values are made of it, another layer reads it, or it is
            not known.
        heads: how many heads q has; needed only where its gain is shared, and else that of query.features.
        shared_key: width of the last part of each head of q whose key is one for all heads and is left alone: the rotary part of
            MLA. key then names the rest of k.
        weights: names of the matrices that project, within the attention module: what `spectral_reparam` takes. By default those
            that query and key name, unless these are gains.
        unfoldable: why no scale can be folded here, as a clause; "" where it can.

    Raises:
        ArgumentError: heads and features do not fit one another.
    """

    query: Heads
    key: Heads | None = None
    heads: int = 0
    shared_key: int = 0
    weights: tuple[str, ...] = ()
    unfoldable: str = ""

    def __post_init__(self) -> None:
        if not self.heads:
            object.__setattr__(self, "heads", self.query.count)  # frozen
        if not self.weights:
            named = [heads.parameters[0] for heads in (self.query, self.key) if heads is not None and heads.dim is not None]
            object.__setattr__(self, "weights", tuple(dict.fromkeys(named)))
        if self.query.count not in (1, self.heads):
            raise ArgumentError("query.features", f"{self.query.count} heads", f"{self.heads} or, shared by all, 1")
        if self.key is not None and self.heads % self.key.count:
            raise ArgumentError("key.features", f"{self.key.count} heads", f"a number that divides the {self.heads} of q")
        if not 0 <= self.shared_key < self.head_dim:
            raise ArgumentError("shared_key", self.shared_key, f"a width from 0 on and below q's {self.head_dim}")

    @property
    def head_dim(self) -> int:
        """d, the width of one head of q."""
        return self.query.features.shape[1]
