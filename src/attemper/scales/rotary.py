"""Rules that make up for a stretched RoPE: the factor on its cosines and sines, squared, and DeepSeek's on the scale itself.

A factor on cos and sin is on q and on k, so on the product twice. It reaches only the part of the width that RoPE turns: where
that is not all of it (partial rotary factors, MLA), logits are no multiple of q·k, and these rules do not describe them.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from attemper.errors import ArgumentError
from attemper.scales.arguments import fixed, positive
from attemper.scales.base import LogitShape, OnBase, Scale, product
from attemper.scales.rules import INVERSE_SQRT


def mscale(stretch: float, weight: float = 1.0) -> float:
    """0.1·weight·ln(stretch) + 1, and 1 where nothing is stretched (YaRN, section 3.4; the weight is DeepSeek's)."""
    return 0.1 * weight * math.log(stretch) + 1.0 if stretch > 1.0 else 1.0


@dataclass(frozen=True)
class Yarn(OnBase):
    """base·a², a = 0.1·ln(s) + 1: YaRN's temperature, which its cosines and sines carry.

    Assumes that RoPE turns the whole width. With mscale and mscale_all_dim, a = mscale(s, mscale) / mscale(s, mscale_all_dim),
    mscale(s, w) = 0.1·w·ln(s) + 1: 1 where both are equal.

    Args:
        stretch: s, by how much the context is longer than in training (`factor` in a config), above 0; up to 1: a = 1.
        mscale, mscale_all_dim: as in a config, both above 0, or None.
        attention_factor: a itself, above 0, where a config gives it; it goes before the others.
        base: the rule that is multiplied, one without parameters.

    Source: Peng et al. 2023 (YaRN, arXiv 2309.00071), section 3.4; transformers modeling_rope_utils: yarn.
    """

    stretch: float
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    base: Scale = INVERSE_SQRT

    def __post_init__(self) -> None:
        positive("stretch", self.stretch)
        for name in ("mscale", "mscale_all_dim", "attention_factor"):
            if getattr(self, name) is not None:
                positive(name, getattr(self, name))
        fixed("base", self.base)

    @property
    def rope_factor(self) -> float:
        """a, the factor on cos and sin."""
        if self.attention_factor is not None:
            return float(self.attention_factor)
        if self.mscale and self.mscale_all_dim:
            return mscale(self.stretch, self.mscale) / mscale(self.stretch, self.mscale_all_dim)
        return mscale(self.stretch)

    def factor(self, shape: LogitShape) -> float | Tensor:
        """The base's factor times a²."""
        return product(self.base.factor(shape), self.rope_factor**2)


@dataclass(frozen=True)
class LongRope(OnBase):
    """base·a², a = √(1 + ln(s)/ln(n₀)): LongRoPE's factor on cosines and sines.

    Assumes that RoPE turns the whole width.

    Args:
        stretch: s, by how much the context is longer than in training, above 0; up to 1: a = 1.
        original_length: n₀, the length in training, above 1.
        base: the rule that is multiplied, one without parameters.

    Source: Ding et al. 2024 (LongRoPE, arXiv 2402.13753); transformers modeling_rope_utils: longrope.
    """

    stretch: float
    original_length: float
    base: Scale = INVERSE_SQRT

    def __post_init__(self) -> None:
        positive("stretch", self.stretch)
        if positive("original_length", self.original_length) <= 1:
            raise ArgumentError("original_length", repr(self.original_length), "a length above 1")
        fixed("base", self.base)

    @property
    def rope_factor(self) -> float:
        """a, the factor on cos and sin."""
        return math.sqrt(1 + math.log(self.stretch) / math.log(self.original_length)) if self.stretch > 1.0 else 1.0

    def factor(self, shape: LogitShape) -> float | Tensor:
        """The base's factor times a²."""
        return product(self.base.factor(shape), self.rope_factor**2)


@dataclass(frozen=True)
class MScale(OnBase):
    """base·m², m = 0.1·w·ln(s) + 1: DeepSeek's factor on the scale where RoPE is stretched, over the whole width.

    Assumes YaRN with mscale = mscale_all_dim, whose cosines and sines then carry the factor 1. A port that forgets m², or applies
    m, agrees at position 0, where one key is visible.

    Args:
        stretch: s, `factor` in the config, above 0; up to 1: m = 1.
        mscale_all_dim: w, above 0.
        base: the rule that is multiplied, one without parameters; d is the width of the part without RoPE and that with it.

    Source: DeepSeek-AI 2024 (DeepSeek-V2, arXiv 2405.04434), section 3.1.4; transformers deepseek_v3: yarn_apply_mscale.
    """

    stretch: float
    mscale_all_dim: float = 1.0
    base: Scale = INVERSE_SQRT

    def __post_init__(self) -> None:
        positive("stretch", self.stretch)
        positive("mscale_all_dim", self.mscale_all_dim)
        fixed("base", self.base)

    @property
    def mscale(self) -> float:
        """m."""
        return mscale(self.stretch, self.mscale_all_dim)

    def factor(self, shape: LogitShape) -> float | Tensor:
        """The base's factor times m²."""
        return product(self.base.factor(shape), self.mscale**2)
