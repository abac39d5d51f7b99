"""Rules that are one number for a whole layer: powers of the width, numbers from a config, and the depth."""

import math
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from attemper.scales.arguments import finite, fixed, positive, whole
from attemper.scales.base import LogitShape, OnBase, Scale, layer_of, product


@dataclass(frozen=True)
class Constant(Scale):
    """c: one number, whatever the width; Constant() is 1, no scale at all.

    Assumes that the variance is taken care of elsewhere: in the initial query weights (T5's have standard deviation
    (d_model·d)^(-1/2)) or by norms on q and k.

    Args:
        value: the factor, finite.

    Source: Raffel et al. 2020 (arXiv 1910.10683), whose released code draws W_q so; transformers t5, gemma3n: scaling = 1.0.
    """

    value: float = 1.0

    def __post_init__(self) -> None:
        finite("value", self.value)

    def factor(self, shape: LogitShape) -> float:
        """The number itself."""
        return float(self.value)


@dataclass(frozen=True)
class InverseSqrt(Scale):
    """1/√d: logits of variance 1 at any width; what `scale=None` means.

    Assumes entries of q and k that are independent with mean 0 and variance 1, as they are at initialisation at best.
    A width of 0 has the factor 1.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.1.
    """

    def factor(self, shape: LogitShape) -> float:
        """1/√d."""
        return 1.0 / math.sqrt(shape.head_dim) if shape.head_dim else 1.0


@dataclass(frozen=True)
class Inverse(Scale):
    """m/d: for q and k that align in training, so that q·k grows like d and not like √d.

    Assumes that what matters is the trained model at growing widths; at initialisation logits have variance m²/d.

    Args:
        multiplier: m, above 0. With m = √d₀ the rule equals 1/√d at the width d₀ where the model was tuned.

    Source: Yang et al. 2022 (muP, arXiv 2203.03466), definition 4.1; Blake et al. 2024 (u-muP, arXiv 2407.17465).
    """

    multiplier: float = 1.0

    def __post_init__(self) -> None:
        positive("multiplier", self.multiplier)

    def factor(self, shape: LogitShape) -> float:
        """m/d."""
        return self.multiplier / shape.head_dim if shape.head_dim else 1.0


@dataclass(frozen=True)
class Sqrt(Scale):
    """√d: logits of variance 1 from q and k of length 1.

    Assumes q and k divided by their lengths (`unit_operands`): each entry then has variance 1/d, and q·k too.

    Source: Loshchilov et al. 2024 (nGPT, arXiv 2410.01131), section 2.3.2.
    """

    @property
    def unit_operands(self) -> bool:
        """True."""
        return True

    def factor(self, shape: LogitShape) -> float:
        """√d."""
        return math.sqrt(shape.head_dim)


@dataclass(frozen=True)
class InverseSqrtTerms(Scale):
    """1/√(n·d): for logits that are a sum of n products of width d; the whole sum has variance 1, this product 1/n.

    Assumes that the other n − 1 terms are scaled alike and independent. DeBERTa adds content-to-position and
    position-to-content to the product of contents: n = 3, or 2 with one of them. Zamba's (d/2)^(-1/2) is n = ½: its attention
    reads hidden state and embeddings side by side, at twice the width.

    Args:
        terms: n, above 0.

    Source: He et al. 2021 (DeBERTa, arXiv 2006.03654), equation 4; transformers zamba2: scaling = (head_dim / 2) ** -0.5.
    """

    terms: float = 3.0

    def __post_init__(self) -> None:
        positive("terms", self.terms)

    def factor(self, shape: LogitShape) -> float:
        """1/√(n·d)."""
        return 1.0 / math.sqrt(self.terms * shape.head_dim) if shape.head_dim else 1.0


@dataclass(frozen=True)
class QueryPreAttnScalar(Scale):
    """a^(-1/2): as 1/√d, with a number a from the config in the place of the head's width.

    Assumes nothing about the width: Gemma 2 27B has d_model / heads = 144 there and heads of width 128.

    Args:
        scalar: a, above 0.

    Source: Gemma Team 2024 (Gemma 2, arXiv 2408.00118); transformers gemma2: scaling = config.query_pre_attn_scalar**-0.5.
    """

    scalar: float

    def __post_init__(self) -> None:
        positive("scalar", self.scalar)

    def factor(self, shape: LogitShape) -> float:
        """a^(-1/2)."""
        return self.scalar**-0.5


@dataclass(frozen=True)
class AttentionMultiplier(Scale):
    """a: a number from the config, found by a search over widths.

    Assumes that whoever sets the width sets the number: the config's default, 1.0, is no scale at all.

    Args:
        multiplier: a, finite.

    Source: transformers granite: scaling = config.attention_multiplier; a muP multiplier (Yang et al. 2022, arXiv 2203.03466).
    """

    multiplier: float

    def __post_init__(self) -> None:
        finite("multiplier", self.multiplier)

    def factor(self, shape: LogitShape) -> float:
        """The number itself."""
        return float(self.multiplier)


# What rules stand on by default.
UNSCALED, INVERSE_SQRT, INVERSE = Constant(), InverseSqrt(), Inverse()


@dataclass(frozen=True)
class InverseLayer(OnBase):
    """base/(l+1): logits shrink with the depth l, counted from 0.

    Assumes that deeper layers have larger activations, and keeps their products within fp16.

    Args:
        base: the rule that is divided, one without parameters.
        layer: l where it is bound already, see `at`; None: the call's.

    Source: Karamcheti et al. 2021 (Mistral, Stanford CRFM: GPT-2 in fp16); transformers gpt2: scale_attn_by_inverse_layer_idx.
    """

    base: Scale = INVERSE_SQRT
    layer: int | None = None

    def __post_init__(self) -> None:
        fixed("base", self.base)
        if self.layer is not None:
            whole("layer", self.layer, 0)

    def factor(self, shape: LogitShape) -> float | Tensor:
        """The base's factor, divided."""
        layer = layer_of(shape, self) if self.layer is None else self.layer
        return product(self.base.factor(shape), 1.0 / (layer + 1))

    def at(self, layer: int) -> Self:
        """The rule of that layer."""
        return replace(self, base=self.base.at(layer), layer=layer)
