"""Small models that the tests of control train."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Decoder(nn.Module):
    """A small causal decoder over 31 tokens, heads of width 7."""

    def __init__(self, layers: int = 2, heads: int = 3) -> None:
        super().__init__()
        width = 7 * heads
        self.embedding = nn.Embedding(31, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 29, dropout=0.0, batch_first=True, norm_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, 31)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1])
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Of the next token."""
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def drawn(step: int) -> Tensor:
    """The tokens of a step."""
    return torch.randint(31, (5, 13), generator=torch.Generator().manual_seed(step))


class Causal(nn.Module):
    """Causal attention over heads of width 7, as many as its projections give: tensor parallelism may leave it some of them."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        width = 7 * heads
        self.head_dim = 7
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, 7)).transpose(1, 2) for one in (self.q_proj, self.k_proj, self.v_proj))
        return x + self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
