"""The frequencies of rotary embeddings, and the rules that stretch them to longer texts than the model was trained on."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attemper.errors import ArgumentError


@dataclass(frozen=True)
class RopeRule:
    """No stretching: pair i of a head turns by base^(−2i / width) a position.

    Source: Su et al. 2021 (arXiv 2104.09864), section 3.2.2.
    """

    def __post_init__(self) -> None:
        factor = getattr(self, "factor", 1.0)
        if not 1.0 <= factor < math.inf:
            raise ArgumentError("factor", repr(factor), "a number from 1 on: the longer length over that of training")
        length = getattr(self, "original_length", None)
        if length is not None and not length >= 1:
            raise ArgumentError("original_length", repr(length), "the length of training in tokens, above 0")

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies change with the number of tokens at hand."""
        return False

    @property
    def amplitude(self) -> float:
        """What cos and sin are multiplied by: the rotated part of the logits is, by its square."""
        return 1.0

    def frequencies(self, width: int, base: float, length: int | Tensor | None = None) -> Tensor:
        """Radians a position, [width / 2] in float64.

        Args:
            width: how many entries of a head turn.
            base: of the geometric series.
            length: tokens at hand, for a rule that depends on it.
        """
        return _series(width, base)


@dataclass(frozen=True)
class LinearRope(RopeRule):
    """Every frequency / factor: positions are squeezed into the trained range.

    Source: Chen et al. 2023 (arXiv 2306.15595), section 2.3.
    """

    factor: float

    def frequencies(self, width: int, base: float, length: int | Tensor | None = None) -> Tensor:
        """Radians a position, [width / 2]."""
        return _series(width, base) / self.factor


@dataclass(frozen=True)
class NTKRope(RopeRule):
    """A larger base, base·α^(width / (width − 2)): the slowest pair is stretched by α, the fastest is left alone.

    α = factor, or, where `original_length` is given, α = max(1, factor·length / original_length − (factor − 1)), which grows with
    the text at hand ("dynamic").

    Source: "NTK-aware" scaling by bloc97; written up by Peng et al. 2023 (arXiv 2309.00071), sections 3.1 and 3.3.
    """

    factor: float
    original_length: int | None = None

    @property
    def depends_on_length(self) -> bool:
        """True for the dynamic form."""
        return self.original_length is not None

    def frequencies(self, width: int, base: float, length: int | Tensor | None = None) -> Tensor:
        """Radians a position, [width / 2]."""
        if width <= 2:
            raise ArgumentError("width", str(width), "more than 2: this rule leaves the first pair alone and stretches the last")
        stretch = self._stretch(length)
        exponents = torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / (width - 2)
        if isinstance(stretch, Tensor):
            exponents = exponents.to(stretch.device)
        return _series(width, base).to(exponents.device) * stretch**-exponents

    def _stretch(self, length: int | Tensor | None) -> float | Tensor:
        if self.original_length is None:
            return self.factor
        if length is None:
            return 1.0
        if isinstance(length, Tensor):
            return (length.double() * (self.factor / self.original_length) - (self.factor - 1.0)).clamp(min=1.0)
        return max(1.0, self.factor * length / self.original_length - (self.factor - 1.0))


@dataclass(frozen=True)
class YarnRope(RopeRule):
    """Fast pairs stay, slow pairs / factor, a linear ramp between; and cos and sin × the attention factor.

    Fast: more than `beta_fast` turns within the trained length; slow: fewer than `beta_slow`. The attention factor is
    0.1·ln factor + 1 unless given; with `mscale` and `mscale_all_dim` it is
    (0.1·mscale·ln factor + 1) / (0.1·mscale_all_dim·ln factor + 1), as in DeepSeek-V2, which puts the rest into the scale.

    Args:
        factor: the longer length over that of training.
        original_length: the length of training.
        beta_fast, beta_slow: turns within the length of training, the ends of the ramp.
        attention_factor: a number, or None for the formula.
        mscale, mscale_all_dim: see above; both or neither.
        truncate: widen the ramp to whole pairs, as the paper's code does.

    Source: Peng et al. 2023 (arXiv 2309.00071), sections 3.2 and 3.4.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @property
    def amplitude(self) -> float:
        """The attention factor."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return self._temperature(1.0)

    def _temperature(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0

    def frequencies(self, width: int, base: float, length: int | Tensor | None = None) -> Tensor:
        """Radians a position, [width / 2]."""
        first, last = self._pair(self.beta_fast, width, base), self._pair(self.beta_slow, width, base)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        # A ramp of no width would divide by 0; from one pair to the next is a step.
        slope = max(last - first, 0.0) or 1.0
        slow = ((torch.arange(width // 2, dtype=torch.float64, device="cpu") - first) / slope).clamp(0.0, 1.0)
        series = _series(width, base)
        return series * (1.0 - slow) + series / self.factor * slow

    def _pair(self, turns: float, width: int, base: float) -> float:
        """Which pair, as a real number, makes so many turns within the length of training."""
        return width * math.log(self.original_length / (turns * 2.0 * math.pi)) / (2.0 * math.log(base))


@dataclass(frozen=True)
class Llama3Rope(RopeRule):
    """Wavelengths above original_length / low_freq_factor × factor, those below original_length / high_freq_factor as they are.

    Between the two the frequency goes over linearly in the number of turns within the trained length.

    Source: the code that came with Llama 3.1 (Grattafiori et al. 2024, arXiv 2407.21783).
    """

    factor: float
    original_length: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.high_freq_factor > self.low_freq_factor:
            raise ArgumentError(
                "high_freq_factor", repr(self.high_freq_factor), f"more than low_freq_factor = {self.low_freq_factor}"
            )

    def frequencies(self, width: int, base: float, length: int | Tensor | None = None) -> Tensor:
        """Radians a position, [width / 2]."""
        series = _series(width, base)
        turns = self.original_length * series / (2.0 * math.pi)
        fast = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0.0, 1.0)
        return series * fast + series / self.factor * (1.0 - fast)


def _series(width: int, base: float) -> Tensor:
    # On the CPU whatever the default device is: these are numbers of the definition, moved where they are used.
    return base ** -(torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width)
