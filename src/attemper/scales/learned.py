"""Rules with a parameter: modules, so that a model which holds one trains it. Their gradient comes through the attention.

A bound is a clamp, as in Swin v2: beyond it the factor stays put and its gradient is 0, so only weight decay brings it back.
Parameters keep their dtype; factors are formed in float32 at least, because bfloat16 moves a temperature near 100 by up to 0.25.
"""

import math

import torch
from torch import Tensor, nn

from attemper.errors import ArgumentError
from attemper.scales.arguments import finite, fixed, flag, positive, whole
from attemper.scales.base import LogitShape, OnBase, Scale, product
from attemper.scales.positional import log_visible_keys
from attemper.scales.rules import INVERSE_SQRT, UNSCALED


class _Parametrised(nn.Module, OnBase):
    """A rule with one parameter, a scalar or one number a head, on top of a base."""

    base: Scale = UNSCALED

    def __init__(self, name: str, heads: int | None, initial: float, base: Scale) -> None:
        super().__init__()
        self.heads = heads if heads is None else whole("heads", heads, 1)
        self.base = fixed("base", base)
        self._name, self._initial = name, float(initial)
        self.register_parameter(name, nn.Parameter(torch.empty(() if heads is None else (heads,))))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the parameter to its initial value again."""
        nn.init.constant_(getattr(self, self._name), self._initial)

    def _read(self, shape: LogitShape) -> Tensor:
        if self.heads is not None and self.heads != shape.heads:
            expected = f"{self.heads}, for which this {type(self).__name__} was made"
            raise ArgumentError("heads", f"{shape.heads} heads of query", expected)
        parameter: Tensor = getattr(self, self._name)
        return parameter if parameter.dtype == torch.float64 else parameter.to(torch.float32)

    def extra_repr(self) -> str:
        """What the module prints between its brackets."""
        return f"heads={self.heads}, base={self.base}"


class Learned(_Parametrised):
    """base·exp(min(max(θ, ln a), ln b)): a learned factor θ in logarithms, one for all heads or one a head.

    Assumes that the factor is positive: a step in θ is a relative one, and weight decay pulls towards the base.

    Args:
        heads: one factor a head for so many heads, from 1; None: one for all.
        initial: exp(θ) at the start, from lowest to highest.
        lowest, highest: a and b, the bounds of the factor on top of the base, above 0.
        base: the rule that is multiplied, one without parameters.

    Source: the parametrisation of CLIP (Radford et al. 2021, arXiv 2103.00020, section 2.3), on attention's logits.
    """

    log_factor: nn.Parameter

    def __init__(
        self,
        heads: int | None = None,
        *,
        initial: float = 1.0,
        lowest: float = 0.01,
        highest: float = 100.0,
        base: Scale = INVERSE_SQRT,
    ) -> None:
        bounds = positive("lowest", lowest), positive("highest", highest)
        if not lowest <= positive("initial", initial) <= highest:
            raise ArgumentError("initial", repr(initial), f"a number from lowest={lowest!r} to highest={highest!r}")
        super().__init__("log_factor", heads, math.log(initial), base)
        self.lowest, self.highest = bounds

    def factor(self, shape: LogitShape) -> float | Tensor:
        """The base's factor times the learned one: 0-d, or [heads]."""
        bounded = self._read(shape).clamp(math.log(self.lowest), math.log(self.highest))
        return product(bounded.exp(), self.base.factor(shape))


class Cosine(_Parametrised):
    """exp(min(s, ln b)): a learned temperature for the cosine of q and k, one a head.

    Assumes q and k divided by their lengths (`unit_operands`): the product is then a cosine, and logits stay within ±b.

    Args:
        heads: one temperature a head for so many heads, from 1; None: one for all.
        initial: exp(s) at the start, above 0 and up to highest.
        highest: b, above 0.

    Source: Liu et al. 2022 (Swin v2, arXiv 2111.09883), section 3.2; transformers swinv2: logit_scale, clamped at ln 100.
    """

    logit_scale: nn.Parameter

    def __init__(self, heads: int | None = None, *, initial: float = 10.0, highest: float = 100.0) -> None:
        if positive("initial", initial) > positive("highest", highest):
            raise ArgumentError("initial", repr(initial), f"a number up to highest={highest!r}")
        super().__init__("logit_scale", heads, math.log(initial), UNSCALED)
        self.highest = highest

    @property
    def unit_operands(self) -> bool:
        """True."""
        return True

    def factor(self, shape: LogitShape) -> Tensor:
        """The temperature: 0-d, or [heads]."""
        return self._read(shape).clamp(max=math.log(self.highest)).exp()


class LogLength(_Parametrised):
    """base·s·ln(n): SSMax, with a learned slope s, one a head: over n keys the softmax of z becomes nˢᶻ / Σ nˢᶻ.

    Assumes that keys which matter keep their distance from the rest as n grows. n is the size of the softmax's input: p + 1 under
    causal attention, where the query's position p is offset + i, and all keys otherwise; padding and windows are not
    counted. The first query's factor is 0, and its only key gets weight 1 all the same (not beside a sink).

    Args:
        heads: one slope a head for so many heads, from 1; None: one for all.
        initial: s at the start, finite. 0.43 is the value of the paper's figure 1; 1/ln(n) would keep the base's logits.
        causal: whether n is p + 1, or all keys.
        base: the rule that is multiplied, one without parameters.

    Source: Nakanishi 2025 (SSMax, arXiv 2501.19399), definition in section 2; there s is learned per layer and head.
    """

    slope: nn.Parameter

    def __init__(
        self,
        heads: int | None = None,
        *,
        initial: float = 0.43,
        causal: bool = True,
        base: Scale = INVERSE_SQRT,
    ) -> None:
        super().__init__("slope", heads, finite("initial", initial), base)
        self.causal = flag("causal", causal)

    @property
    def depends_on_position(self) -> bool:
        """True: it differs with the number of keys."""
        return True

    def factor(self, shape: LogitShape) -> float | Tensor:
        """The base's factor times s·ln(n): [heads, queries] where causal ([1, queries] with one slope for all), else [heads]."""
        slope = self._read(shape)
        log = log_visible_keys(shape._replace(device=slope.device), self.causal)
        return product(product(slope, log), self.base.factor(shape._replace(device=slope.device)))
