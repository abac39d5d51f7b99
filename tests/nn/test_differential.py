"""DifferentialAttention against transformers' DiffLlama."""

import pytest
import torch
from torch import nn
from transformers import DiffLlamaConfig
from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention

from attemper.errors import ArgumentError
from attemper.nn import DifferentialAttention, RotaryEmbedding

BATCH, TOKENS, HEADS, WIDTH = 2, 7, 3, 4
EMBED = 2 * HEADS * WIDTH


def test_it_is_the_attention_of_diffllama() -> None:
    config = DiffLlamaConfig(hidden_size=EMBED, num_attention_heads=2 * HEADS, num_key_value_heads=2 * HEADS, head_dim=WIDTH)
    config._attn_implementation = "eager"
    theirs = DiffLlamaAttention(config, layer_idx=3)
    ours = DifferentialAttention(EMBED, HEADS, layer=3)
    assert ours.lambda_init == pytest.approx(theirs.lambda_init)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    # Theirs holds the heads' first queries before all second ones; ours has the two of a head side by side. The values of a
    # head are theirs of head h and of head h + HEADS.
    paired = torch.arange(EMBED).reshape(2, HEADS, WIDTH).transpose(0, 1).flatten()
    state = theirs.state_dict()
    mine = {f"{name}_proj.weight": state[f"{name}_proj.weight"][paired] for name in ("q", "k", "v")}
    mine |= {name: tensor for name, tensor in state.items() if name.startswith("lambda_")}
    mine["out_proj.weight"] = state["o_proj.weight"]
    ours.load_state_dict(mine | {"norm.weight": torch.ones(2 * WIDTH)})
    x = torch.randn(BATCH, TOKENS, EMBED)
    mask = torch.full((TOKENS, TOKENS), -torch.inf).triu(1)[None, None]
    no_turn = torch.ones(BATCH, TOKENS, WIDTH), torch.zeros(BATCH, TOKENS, WIDTH)
    expected = theirs(x, no_turn, mask)[0]
    ours.norm.eps = theirs.groupnorm.eps or torch.finfo(torch.float32).eps
    torch.testing.assert_close(ours(x, is_causal=True), expected)
    torch.testing.assert_close(ours(x, mask), expected)


def test_both_softmaxes_are_turned_and_everything_learns() -> None:
    module = DifferentialAttention(24, 3, rope=RotaryEmbedding(4), dropout=0.1, bias=True)
    x = torch.randn(BATCH, TOKENS, 24, requires_grad=True)
    before = module.eval()(x)
    turned = DifferentialAttention(24, 3, bias=True).eval()
    turned.load_state_dict(module.state_dict())
    assert not torch.allclose(before, turned(x))
    module.train()(x).square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    assert all(gradients[f"lambda_{name}"].abs().max() > 0 for name in ("q1", "k1", "q2", "k2"))


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ArgumentError, match="embed_dim: got 10; expected a multiple of 2·num_heads = 6"):
        DifferentialAttention(10, 3)
    with pytest.raises(ArgumentError, match=r"x: got shape \(2, 12\); expected \[batch, tokens, 12\]"):
        DifferentialAttention(12, 3)(torch.zeros(2, 12))
