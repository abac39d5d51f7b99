"""The encoder with a decoder: a sequence from a sequence, with dot-product or with additive attention between the two."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attemper.lab.config import Model
from attemper.lab.models.blocks import Block, Positions, initialise
from attemper.nn import AdditiveAttention


class Translator(nn.Module):
    """Encoder and decoder of pre-norm blocks. Both see learned positions: reversal is a matter of places.

    `attention` and `rule` are of the decoder's look at the encoder, which with `attention="additive"` is `AdditiveAttention` on
    projected values. Attention within a sequence is the dot product with 1/√d whatever they are, so that models differ in one
    thing.
    """

    def __init__(self, config: Model, vocabulary: int, classes: int, tokens: int) -> None:
        super().__init__()
        config = config.model_copy(update={"position": "none" if config.position == "none" else "learned"})
        self.embedding = nn.Embedding(vocabulary, config.width)
        self.source_positions, self.target_positions = Positions(config, tokens), Positions(config, tokens)
        within, layers = config.model_copy(update={"rule": "inverse_sqrt"}), range(config.layers)
        self.encoder = nn.ModuleList(Block(within, tokens, causal=False) for _ in layers)
        self.decoder = nn.ModuleList(Block(within, tokens, causal=True, crossed=config) for _ in layers)
        if config.attention == "additive":
            for block in self.decoder:
                block.cross = Additive(config)
        self.memory_norm = nn.RMSNorm(config.width)
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, classes, bias=False)
        initialise(self, config.init)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """int64 [batch, symbols] twice -> logits over the classes, [batch, symbols, classes]."""
        memory = self.source_positions(self.embedding(source))
        for block in self.encoder:
            memory = block(memory)
        memory = self.memory_norm(memory)
        x = self.target_positions(self.embedding(target))
        for block in self.decoder:
            x = block(x, memory)
        return self.head(self.norm(x))


class Additive(nn.Module):
    """vᵀ·tanh(W_q·q + W_k·k) in the place of the product, with as wide a hidden layer as all heads of the product together."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        each = config.head_dim
        inner = config.heads * each if isinstance(each, int) else sum(each)
        self.score = AdditiveAttention(config.width, config.width, inner)
        self.v_proj = nn.Linear(config.width, inner, bias=False)
        self.o_proj = nn.Linear(inner, config.width, bias=False)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """[batch, tokens, width], [batch, keys, width] -> [batch, tokens, width]."""
        mixed = self.score(x, memory, self.v_proj(memory))
        assert isinstance(mixed, torch.Tensor)
        return self.o_proj(mixed)
