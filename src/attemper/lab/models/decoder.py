"""The decoder: next token of a sequence."""

from __future__ import annotations

from torch import Tensor, nn

from attemper.lab.config import Model
from attemper.lab.models.blocks import Block, Positions, initialise


class Decoder(nn.Module):
    """Embedding, causal pre-norm blocks, RMSNorm, output layer.

    Args:
        config: the dials. vocabulary: of the input. classes: of the output. tokens: longest input of the training.
    """

    def __init__(self, config: Model, vocabulary: int, classes: int, tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, config.width)
        self.positions = Positions(config, tokens)
        self.blocks = nn.ModuleList(Block(config, tokens, causal=True) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, classes, bias=False)
        initialise(self, config.init)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [batch, tokens] -> logits over the classes, [batch, tokens, classes]."""
        x = self.positions(self.embedding(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
