"""Rules that grow with the query's position, against attention that spreads out over longer contexts.

The position p of query i is offset + i, from 0: in decoding with a cache it is right only if `offset = keys − queries` is passed,
causal or not. A window or padding does not change it.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from attemper.errors import ArgumentError
from attemper.scales.arguments import finite, fixed, flag, positive, whole
from attemper.scales.base import LogitShape, OnBase, Scale, positions, product
from attemper.scales.rules import INVERSE, INVERSE_SQRT, UNSCALED


def log_visible_keys(shape: LogitShape, causal: bool) -> float | Tensor:
    """ln n: n = p + 1 visible keys under causal attention (float32 [1, queries]), else all of them; 0 where there are none."""
    if not causal:
        return math.log(max(shape.keys, 1))
    return (positions(shape) + 1).clamp(max=shape.keys).clamp(min=1).to(torch.float32).log()


class _ByPosition(OnBase):
    """base times a factor of the position."""

    @property
    def depends_on_position(self) -> bool:
        """True."""
        return True

    @abstractmethod
    def temperature(self, position: Tensor) -> Tensor:
        """The factor at each position, int64 → float32 of the same shape."""

    def factor(self, shape: LogitShape) -> float | Tensor:
        """The base's factor times the temperature, [1, queries]."""
        return product(self.base.factor(shape), self.temperature(positions(shape)))


@dataclass(frozen=True)
class Llama4(_ByPosition):
    """base·(1 + β·ln(1 + ⌊(p + 1)/L⌋)): 1 up to position L − 2, then steps that grow with the logarithm.

    Assumes layers without RoPE, the only ones that Llama 4 scales so. Formed in float32, as transformers does.

    Args:
        beta: β, `attn_scale` in the config, finite; length: L, `floor_scale` in the config, from 1.
        base: the rule that is multiplied, one without parameters.

    Source: transformers llama4: attn_temperature_tuning, which cites Nakanishi 2025 (arXiv 2501.19399).
    """

    beta: float = 0.1
    length: int = 8192
    base: Scale = INVERSE_SQRT

    def __post_init__(self) -> None:
        finite("beta", self.beta)
        whole("length", self.length, 1)
        fixed("base", self.base)

    def temperature(self, position: Tensor) -> Tensor:
        """1 + β·ln(1 + ⌊(p + 1)/L⌋)."""
        steps = torch.div(position + 1, self.length, rounding_mode="floor")
        return torch.log1p(steps.to(torch.float32)) * self.beta + 1.0


@dataclass(frozen=True)
class Ministral3(_ByPosition):
    """base·(1 + β·ln(1 + ⌊p/L⌋)): as Llama 4's, one position later, and in every layer.

    Assumes RoPE that was stretched beyond L positions.

    Args:
        beta: β, `llama_4_scaling_beta` in rope_parameters, finite; length: L, original_max_position_embeddings, from 1.
        base: the rule that is multiplied, one without parameters; Mistral 4's is MScale.

    Source: transformers ministral3, mistral4: get_llama_4_attn_scale.
    """

    beta: float = 0.1
    length: int = 16384
    base: Scale = INVERSE_SQRT

    def __post_init__(self) -> None:
        finite("beta", self.beta)
        whole("length", self.length, 1)
        fixed("base", self.base)

    def temperature(self, position: Tensor) -> Tensor:
        """1 + β·ln(1 + ⌊p/L⌋)."""
        steps = torch.div(position, self.length, rounding_mode="floor")
        return torch.log(1 + steps.to(torch.float32)) * self.beta + 1.0


@dataclass(frozen=True)
class Inkling(_ByPosition):
    """base·(1 + α·ln(max((p + 1)/L, 1))): 1 up to position L − 1, then the logarithm without steps.

    Assumes layers that see the whole context (those with a window are not scaled), and norms on q and k. The model multiplies its
    position bias by the same factor.

    Args:
        alpha: α, `log_scaling_alpha` in the config, finite; length: L, `log_scaling_n_floor` in the config, above 0.
        base: the rule that is multiplied, one without parameters: 1/d in inkling, 1/√d in inkling2.

    Source: transformers inkling, inkling2: log_scaling_n_floor.
    """

    alpha: float = 0.1
    length: float = 128000
    base: Scale = INVERSE

    def __post_init__(self) -> None:
        finite("alpha", self.alpha)
        positive("length", self.length)
        fixed("base", self.base)

    def temperature(self, position: Tensor) -> Tensor:
        """1 + α·ln(max((p + 1)/L, 1))."""
        return 1.0 + self.alpha * ((position + 1).to(torch.float32) / self.length).clamp(min=1.0).log()


@dataclass(frozen=True)
class Beam(_ByPosition):
    """base·(1 + (p + 1)/L)^a: a power of the position.

    Assumes layers without RoPE, which see the whole context.

    Args:
        exponent: a, finite; length: L, above 0.
        base: the rule that is multiplied, one without parameters.

    Source: transformers beam: compute_attention_scaling, with a = 0.1 and L = 2048 written into the code.
    """

    exponent: float = 0.1
    length: float = 2048
    base: Scale = INVERSE_SQRT

    def __post_init__(self) -> None:
        finite("exponent", self.exponent)
        positive("length", self.length)
        fixed("base", self.base)

    def temperature(self, position: Tensor) -> Tensor:
        """(1 + (p + 1)/L)^a."""
        return torch.exp(self.exponent * torch.log1p((position + 1).to(torch.float32) / self.length))


@dataclass(frozen=True)
class Critical(OnBase):
    """base·γ·ln(n): for n visible keys, the edge between attention that is uniform and attention that is the identity.

    Assumes q and k of length 1 (`unit_operands`) with a cosine of ρ between different tokens: below γ = 1/(1 − ρ) all tokens
    collapse into one direction, above it each sees itself alone. The paper's n is the number of tokens, all visible; here n is
    p + 1 under causal attention, because the softmax of a row runs over that many.

    Args:
        gamma: γ, above 0; `at_similarity` gives the critical one.
        causal: whether n is p + 1, or all keys.
        base: the rule that is multiplied, one without parameters; Constant() is the paper's.

    Source: Chen et al. 2025 (arXiv 2510.05554), main theorem.
    """

    gamma: float = 1.0
    causal: bool = True
    base: Scale = UNSCALED

    def __post_init__(self) -> None:
        positive("gamma", self.gamma)
        flag("causal", self.causal)
        fixed("base", self.base)

    @classmethod
    def at_similarity(cls, similarity: float, *, causal: bool = True) -> "Critical":
        """The rule at the transition, γ = 1/(1 − ρ), for tokens whose cosine is ρ, in (−1, 1)."""
        if not -1 < finite("similarity", similarity) < 1:
            raise ArgumentError("similarity", repr(similarity), "a cosine between different tokens, in (-1, 1)")
        return cls(1 / (1 - similarity), causal)

    @property
    def unit_operands(self) -> bool:
        """True."""
        return True

    @property
    def depends_on_position(self) -> bool:
        """True: it differs with the number of keys."""
        return True

    def factor(self, shape: LogitShape) -> float | Tensor:
        """The base's factor times γ·ln(n), [1, queries] where causal."""
        return product(self.base.factor(shape), self.gamma * log_visible_keys(shape, self.causal))
