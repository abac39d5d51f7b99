"""`RotaryEmbedding`: positions as rotations of queries and keys, so that their product depends on the distance alone."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from attemper.errors import ArgumentError
from attemper.nn.rope_rules import RopeRule


class RotaryEmbedding(nn.Module):
    """Turns each pair (a, b) of a head's first `width` entries by position·frequency; the rest pass unchanged.

    (a, b) → amplitude·(a·cos φ − b·sin φ, b·cos φ + a·sin φ), φ = position·frequencyᵢ. Lengths are kept (× amplitude, which is 1
    but for YaRN), so the scale of attention is needed as without. Angles are float32, as in the models that are trained with
    them (float64 for float64 inputs), and so is the arithmetic; the frequencies stay float32 in a model that is cast to 16 bits.

    Args:
        width: how many entries of a head turn, even, at most the width of a head (less: "partial").
        base: of the frequencies base^(−2i / width).
        interleaved: pairs are neighbours, (0, 1), (2, 3) … (GPT-J, Cohere); otherwise they are the two halves,
            (0, width / 2), (1, width / 2 + 1) … (GPT-NeoX, LLaMA in Hugging Face's layout). Weights trained with one need it.
        rule: how the frequencies are stretched: `LinearRope`, `NTKRope`, `YarnRope`, `Llama3Rope`; None: not at all.
        device: of the frequencies.

    Raises:
        ArgumentError: an odd or too large width, a base that is not above 1, positions that do not fit.

    Source: Su et al. 2021 (arXiv 2104.09864), section 3.
    """

    frequencies: Tensor

    def __init__(
        self,
        width: int,
        *,
        base: float = 10000.0,
        interleaved: bool = False,
        rule: RopeRule | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(width, int) or width < 2 or width % 2:
            raise ArgumentError("width", repr(width), "an even number from 2 on")
        if not base > 1.0:
            raise ArgumentError("base", repr(base), "a number above 1")
        self.width, self.base, self.interleaved = width, base, interleaved
        self.rule = RopeRule() if rule is None else rule
        self.register_buffer("frequencies", self._exact(None).to(device=device, dtype=torch.float32), persistent=False)

    def forward(
        self, x: Tensor, *, positions: Tensor | None = None, offset: int = 0, length: int | Tensor | None = None
    ) -> Tensor:
        """Queries or keys, turned.

        Args:
            x: [..., heads, tokens, d].
            positions: whole numbers, [tokens] or [batch, tokens]; None: offset, offset + 1, …
            offset: position of the first token, where `positions` are not given.
            length: tokens at hand, for a rule that depends on it; None: the last position and one.

        Returns:
            A tensor of the shape and dtype of `x`.
        """
        if x.ndim < 2 or x.shape[-1] < self.width:
            raise ArgumentError("x", f"shape {tuple(x.shape)}", f"[..., heads, tokens, d] with d at least {self.width}")
        tokens, dtype = x.shape[-2], torch.float64 if x.dtype == torch.float64 else torch.float32
        if positions is None:
            length = offset + tokens if length is None else length
            positions = torch.arange(offset, offset + tokens, device=x.device)
        elif positions.shape[-1:] != (tokens,) or positions.ndim > 2 or (positions.ndim == 2 and x.ndim < 4):
            raise ArgumentError("positions", f"shape {tuple(positions.shape)}", f"[{tokens}], or [batch, {tokens}] for a batch")
        elif length is None and self.rule.depends_on_length:
            length = positions.max() + 1
        frequencies = self._at(length, dtype, x.device)
        angles = positions.to(dtype).unsqueeze(-1) * frequencies
        angles = angles.unsqueeze(-3) if angles.ndim == 3 else angles  # [batch, 1, tokens, width / 2]
        cos, sin = angles.cos() * self.rule.amplitude, angles.sin() * self.rule.amplitude

        turning = x[..., : self.width].to(dtype)
        if self.interleaved:
            a, b = turning.unflatten(-1, (-1, 2)).unbind(-1)
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        else:
            a, b = turning.chunk(2, -1)
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        turned = turned.to(x.dtype)
        return turned if x.shape[-1] == self.width else torch.cat([turned, x[..., self.width :]], -1)

    def extra_repr(self) -> str:
        """What tells two of them apart."""
        return f"{self.width}, base={self.base}, interleaved={self.interleaved}, rule={self.rule}"

    def _exact(self, length: int | Tensor | None) -> Tensor:
        return self.rule.frequencies(self.width, self.base, length)

    def _at(self, length: int | Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.rule.depends_on_length or dtype == torch.float64:
            return self._exact(length).to(device=device, dtype=dtype)
        return self.frequencies

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> "RotaryEmbedding":
        # In bfloat16 the frequencies would be off by 1 part in 500, radians at position 4000: they follow the device only.
        super()._apply(fn, *args, **kwargs)
        if not self.frequencies.is_meta:
            self.frequencies = self._exact(None).to(device=self.frequencies.device, dtype=torch.float32)
        return self
