"""The image classifier: a small ViT."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attemper.lab.config import Model
from attemper.lab.models.blocks import Block, Positions, initialise

PATCH = 2


class Classifier(nn.Module):
    """Patches of 2 × 2 pixels, pre-norm blocks without a causal rule, RMSNorm, mean over the patches, output layer.

    Positions are learned where the configuration says rotary: an image has no order of one dimension.
    """

    def __init__(self, config: Model, classes: int, tokens: int) -> None:
        super().__init__()
        config = config.model_copy(update={"position": "none" if config.position == "none" else "learned"})
        self.embedding = nn.Linear(PATCH * PATCH, config.width)
        self.positions = Positions(config, tokens)
        self.blocks = nn.ModuleList(Block(config, tokens, causal=False) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, classes, bias=False)
        initialise(self, config.init)

    def forward(self, images: Tensor) -> Tensor:
        """float32 [batch, height, width] -> logits over the classes, [batch, 1, classes]."""
        x = self.positions(self.embedding(patches(images)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1, keepdim=True))


def patches(images: Tensor) -> Tensor:
    """[batch, height, width] -> [batch, patches, 4], row by row."""
    rows = images.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH)
    return torch.flatten(rows.flatten(3), 1, 2)
