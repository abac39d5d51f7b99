"""What the lab's models are made of besides attention: pre-norm blocks, positions, and how weights start."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attemper.errors import ArgumentError
from attemper.lab.config import Model
from attemper.lab.models.attention import Attention
from attemper.lab.models.example import example_attention


class Block(nn.Module):
    """x ← x + attention(norm x); with a memory, x ← x + attention(norm x, memory); x ← x + W₂·gelu(W₁·norm x).

    Args:
        config: the dials. tokens: length of the training examples. causal: of attention within the sequence.
        crossed: the dials of attention to a memory; None: there is none.
    """

    def __init__(self, config: Model, tokens: int, *, causal: bool, crossed: Model | None = None) -> None:
        super().__init__()
        width = config.width
        hidden = 4 * width if config.hidden is None else config.hidden
        self.attention_norm = nn.RMSNorm(width)
        example = config.attention == "example"
        self.attention = example_attention(config, tokens) if example else Attention(config, tokens, causal)
        self.cross_norm = None if crossed is None else nn.RMSNorm(width)
        self.cross = None if crossed is None else Attention(crossed, tokens, False)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """[batch, tokens, width] -> the same."""
        x = x + self.attention(self.attention_norm(x))
        if self.cross is not None and self.cross_norm is not None:
            x = x + self.cross(self.cross_norm(x), memory)
        return x + self.mlp(self.mlp_norm(x))


class Positions(nn.Module):
    """One learned vector a position, added; nothing where positions are rotary or absent."""

    def __init__(self, config: Model, tokens: int) -> None:
        super().__init__()
        self.table = nn.Parameter(0.02 * torch.randn(tokens, config.width)) if config.position == "learned" else None

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] -> the same."""
        if self.table is None:
            return x
        if x.shape[1] > len(self.table):
            expected = f"at most {len(self.table)}, for which positions were learned; or model.position 'rotary' or 'none'"
            raise ArgumentError("length", f"{x.shape[1]} tokens", expected)
        return x + self.table[: x.shape[1]]


def initialise(model: nn.Module, how: str) -> None:
    """Draw the linear layers' weights from torch's generator.

    Args:
        model: of which every `nn.Linear` is drawn, in order of `modules()`.
        how: "torch": left as they are, uniform with variance 1/(3·inputs). "unit": normal with variance 1/inputs, which makes of
            inputs of unit variance q and k of unit variance. "mup": as "unit", but the last layer, `head`, starts at 0.
    """
    if how == "torch":
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if how == "mup" and name == "head":
                nn.init.zeros_(module.weight)
