"""Block: its formula, its options, and that a stack of it learns."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper.errors import ArgumentError
from attemper.nn import Block, QKNorm, RotaryEmbedding

BATCH, TOKENS, EMBED, VOCABULARY = 3, 11, 12, 17


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_it_adds_attention_and_then_the_mlp_each_behind_its_norm(norm: str) -> None:
    block = Block(EMBED, 3, norm=norm, mlp_ratio=2.5, softcap=2.0)
    assert block.widen.out_features == 30
    x = torch.randn(BATCH, TOKENS, EMBED)
    padding = torch.arange(TOKENS).expand(BATCH, -1) > 8
    function = F.layer_norm if norm == "layer" else F.rms_norm
    normed = function(x, (EMBED,), **({} if norm == "layer" else {"eps": None}))
    middle = x + block.attention(normed, normed, normed, padding, is_causal=True)[0]
    expected = middle + block.narrow(F.gelu(block.widen(function(middle, (EMBED,)))))
    output, rows = block(x, key_padding_mask=padding, is_causal=True, return_stats=True)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(block(x, key_padding_mask=padding, is_causal=True), expected)
    assert rows.lse.shape == (BATCH, 3, TOKENS)


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, EMBED)
        self.blocks = nn.ModuleList(Block(EMBED, 2, **options) for _ in range(2))
        self.read = nn.Linear(EMBED, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, is_causal=True)
        return self.read(x)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {
        "norm": "rms",
        "qk_norm": "rms",
        "softcap": 5.0,
        "sinks": True,
        "rope": RotaryEmbedding(4),
        "num_kv_heads": 1,
        "gate": True,
        "dropout": 0.1,
        "bias": False,
    },
    "widths": {"head_dims": (4, 10), "qk_norm": "l2", "scale": 8.0},
    "norm of one's own": {"qk_norm": QKNorm(6, over="all", num_heads=2)},
}


def train(options: dict[str, Any]) -> list[float]:
    torch.manual_seed(1)
    model = Model(**options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tokens = torch.randint(VOCABULARY, (BATCH, TOKENS))
    tokens[:, 1::2] = tokens[:, :-1:2]  # every second token repeats the one before
    losses = []
    for _ in range(25):
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", OPTIONS)
def test_two_of_them_learn_and_a_seed_repeats_them(name: str) -> None:
    losses = train(OPTIONS[name])
    assert losses[-1] < 0.6 * losses[0]
    if "norm of" not in name:  # that module was trained on the way
        assert train(OPTIONS[name]) == losses


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ArgumentError, match="norm: got 'batch'; expected one of 'layer', 'rms'"):
        Block(EMBED, 3, norm="batch")
    with pytest.raises(ArgumentError, match="batch_first: got False; expected nothing"):
        Block(EMBED, 3, batch_first=False)
