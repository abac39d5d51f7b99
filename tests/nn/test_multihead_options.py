"""Every option beyond torch's, each against its definition, and what they learn by."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper
from attemper import scales
from attemper.nn import MultiheadAttention, QKNorm, RotaryEmbedding, YarnRope
from attemper.ops import row_stats
from attemper.stats import FIELDS
from tests.nn.multihead_cases import BATCH, EMBED, TOKENS, finish, heads_of, spread

IMPLEMENTATIONS = ("reference", "blocked", "cpu")


def test_softcap_sinks_and_a_scale_per_head() -> None:
    module = spread(MultiheadAttention(EMBED, 3, softcap=0.7, sinks=True, scale=nn.Parameter(torch.ones(3)), batch_first=True))
    x = torch.randn(BATCH, TOKENS, EMBED)
    q, k, v = heads_of(module, x)
    logits = 0.7 * torch.tanh(module.scale.reshape(-1, 1, 1) * (q @ k.mT) / 0.7)
    assert module.sinks is not None
    column = module.sinks.reshape(-1, 1, 1).expand(BATCH, -1, TOKENS, 1)
    weights = torch.softmax(torch.cat([logits, column], -1), -1)[..., :-1]
    output, own = module(x, x, x, average_attn_weights=False)
    torch.testing.assert_close(own, weights)
    torch.testing.assert_close(output, finish(module, weights @ v))
    torch.testing.assert_close(module(x, x, x, need_weights=False)[0], output)
    module(x, x, x, need_weights=False)[0].sum().backward()
    assert module.sinks.grad is not None
    assert module.sinks.grad.abs().min() > 0.0
    assert module.scale.grad.abs().min() > 0.0


def test_grouped_heads_are_repeated_ones() -> None:
    grouped = spread(MultiheadAttention(EMBED, 6, num_kv_heads=2, batch_first=True))
    full = MultiheadAttention(EMBED, 6, batch_first=True)

    def repeated(parameter: Tensor) -> Tensor:
        q, k, v = parameter.split([12, 4, 4])
        k, v = (part.unflatten(0, (2, 2)).repeat_interleave(3, 0).flatten(0, 1) for part in (k, v))
        return torch.cat([q, k, v])

    state = grouped.state_dict()
    full.load_state_dict(state | {name: repeated(state[name]) for name in ("in_proj_weight", "in_proj_bias")})
    x = torch.randn(BATCH, TOKENS, EMBED)
    for need_weights in (True, False):
        for own, expected in zip(grouped(x, x, x, None, need_weights), full(x, x, x, None, need_weights), strict=True):
            if expected is not None:
                torch.testing.assert_close(own, expected)


@pytest.mark.parametrize(("kv_heads", "widths"), [(None, (2, 5, 3, 5)), (2, (5, 5, 2, 2)), (4, (3, 2, 2, 3)), (1, (5, 5, 5, 5))])
def test_heads_of_different_widths_are_heads_side_by_side(kv_heads: int | None, widths: tuple[int, ...]) -> None:
    module = spread(
        MultiheadAttention(
            EMBED, 4, num_kv_heads=kv_heads, head_dims=widths, sinks=True, batch_first=True, add_bias_kv=True, add_zero_attn=True
        )
    )
    share = 4 // (kv_heads or 4)
    kv_widths = widths[::share]
    x = torch.randn(BATCH, TOKENS, EMBED)
    mask = torch.randn(BATCH * 4, TOKENS, TOKENS)
    sizes = [sum(widths), sum(kv_widths), sum(kv_widths)]
    q, k, v = F.linear(x, module.in_proj_weight, module.in_proj_bias).split(sizes, -1)
    nothing = torch.zeros(BATCH, 1, sum(kv_widths))
    k, v = (torch.cat([x, bias.expand(BATCH, 1, -1), nothing], 1) for x, bias in ((k, module.bias_k), (v, module.bias_v)))
    keys, values = k.split(kv_widths, -1), v.split(kv_widths, -1)
    heads, every_weight = [], []
    for head, query in enumerate(q.split(widths, -1)):
        logits = query @ keys[head // share].mT / math.sqrt(widths[head])  # each has the scale of its own width
        logits = logits + F.pad(mask.reshape(BATCH, 4, TOKENS, TOKENS)[:, head], (0, 2))
        column = module.sinks[head].expand(BATCH, TOKENS, 1)
        weights = torch.softmax(torch.cat([logits, column], -1), -1)[..., :-1]
        every_weight.append(weights)
        heads.append(weights @ values[head // share])
    expected = module.out_proj(torch.cat(heads, -1))
    output, weights, rows = module(x, x, x, attn_mask=mask, average_attn_weights=False, return_stats=True)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(weights, torch.stack(every_weight, 1))
    output, _, again = module(x, x, x, attn_mask=mask, need_weights=False, return_stats=True)
    torch.testing.assert_close(output, expected)
    for name in ("lse", "entropy", *FIELDS):
        torch.testing.assert_close(getattr(again, name), getattr(rows, name))
    assert rows.sink


def test_one_scale_a_head_reaches_its_head_whatever_the_widths() -> None:
    factors = torch.tensor([0.3, 0.7, 1.1])
    asked = []

    class Rule(nn.Module):
        def factor(self, shape: Any) -> Tensor:
            asked.append(shape)
            return factors if shape.head_dim == 2 else 2.0 * factors

    x = torch.randn(BATCH, TOKENS, EMBED)
    module = spread(MultiheadAttention(EMBED, 3, head_dims=(2, 5, 2), scale=Rule(), batch_first=True))
    own = module(x, x, x, is_causal=True, offset=3)[0]
    assert [tuple(shape)[:5] for shape in asked] == [(2, 3, TOKENS, TOKENS, 3), (5, 3, TOKENS, TOKENS, 3)]
    each = factors * torch.tensor([1.0, 2.0, 1.0])
    for scale in (each, each.reshape(3, 1), each.reshape(1, 3, 1).expand(BATCH, 3, TOKENS)):
        constant = MultiheadAttention(EMBED, 3, head_dims=(2, 5, 2), scale=scale, batch_first=True)
        constant.load_state_dict(module.state_dict())
        torch.testing.assert_close(constant(x, x, x, is_causal=True, offset=3)[0], own)


@pytest.mark.parametrize("widths", [None, (2, 5, 2)])
@pytest.mark.parametrize(
    "rule", [scales.Inverse(8.0), scales.Learned(3), scales.LogLength(3), scales.Llama4()], ids=lambda rule: type(rule).__name__
)
def test_a_rule_is_its_factor(rule: scales.Scale, widths: tuple[int, ...] | None) -> None:
    if isinstance(rule, nn.Module):
        spread(rule)
    module = spread(MultiheadAttention(EMBED, 3, head_dims=widths, scale=rule, batch_first=True))
    factors = []
    for head, width in enumerate(module.layout.widths):
        factor = torch.as_tensor(rule.factor(scales.LogitShape(width, 3, TOKENS, TOKENS, 2)), dtype=torch.float32)
        factor = factor.unsqueeze(-1) if factor.ndim == 1 else factor
        factors.append(factor.expand(BATCH, 3, TOKENS)[:, head])
    plain = MultiheadAttention(EMBED, 3, head_dims=widths, scale=torch.stack(factors, 1), batch_first=True)
    plain.load_state_dict({name: tensor for name, tensor in module.state_dict().items() if not name.startswith("scale.")})
    x = torch.randn(BATCH, TOKENS, EMBED)
    learned = [parameter for name, parameter in module.named_parameters() if name.startswith("scale.")]
    assert bool(learned) == isinstance(rule, nn.Module)
    for need_weights in (True, False):
        output = module(x, x, x, None, need_weights, offset=2)[0]
        torch.testing.assert_close(output, plain(x, x, x, None, need_weights)[0])
        for gradient in torch.autograd.grad(output.square().sum(), learned) if learned else ():
            assert gradient.abs().min() > 0.0


def test_norm_then_rotation_then_attention() -> None:
    rope = RotaryEmbedding(4, rule=YarnRope(4.0, 8))
    module = spread(MultiheadAttention(15, 3, qk_norm="layer", rope=rope, batch_first=True, add_zero_attn=True))
    x = torch.randn(BATCH, TOKENS, 15)
    q, k, v = heads_of(module, x)
    assert isinstance(module.qk_norm, QKNorm)
    q, k = module.qk_norm(q, k)
    q, k = rope(q, offset=2), rope(k)
    k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))  # the zero key is neither normalised nor turned
    expected, rows = attemper.attention(q, k, v, return_stats=True)
    for need_weights in (True, False):
        output, _, own = module(x, x, x, None, need_weights, offset=2, return_stats=True)
        torch.testing.assert_close(output, finish(module, expected))
        torch.testing.assert_close(own.lse, rows.lse)
        torch.testing.assert_close(own.var, rows.var)


def test_each_width_has_its_own_norm() -> None:
    module = MultiheadAttention(EMBED, 3, head_dims=(2, 5, 2), qk_norm="rms")
    assert {name: tuple(p.shape) for name, p in module.named_parameters() if "norm" in name} == {
        "qk_norm.2.q_norm.weight": (2,),
        "qk_norm.2.k_norm.weight": (2,),
        "qk_norm.5.q_norm.weight": (5,),
        "qk_norm.5.k_norm.weight": (5,),
    }
    x = torch.randn(TOKENS, BATCH, EMBED)
    bound = torch.tensor([2, 5, 2]).sqrt()  # |q̂·k̂|/√d ≤ d/√d
    _, _, rows = module(x, x, x, need_weights=False, return_stats=True)
    assert (rows.max.amax((0, 2)) <= bound).all()


def test_the_gate_multiplies_the_heads() -> None:
    module = spread(MultiheadAttention(EMBED, 3, gate=True))
    x = torch.randn(TOKENS, BATCH, EMBED)
    q, k, v = heads_of(module, x.transpose(0, 1))
    heads = attemper.attention(q, k, v).transpose(1, 2).flatten(2).transpose(0, 1)
    torch.testing.assert_close(module(x, x, x)[0], module.out_proj(heads * torch.sigmoid(module.gate_proj(x))))


def test_the_record_is_that_of_the_projections() -> None:
    module = spread(MultiheadAttention(EMBED, 3, batch_first=True, softcap=1.3))
    x = torch.randn(BATCH, TOKENS, EMBED)
    q, k, _ = heads_of(module, x)
    expected = row_stats(q, k, softcap=1.3, is_causal=True)
    for need_weights in (True, False):
        rows = module(x, x, x, None, need_weights, is_causal=True, return_stats=True)[2]
        assert rows.lse.shape == (BATCH, 3, TOKENS)
        unbatched = module(x[1], x[1], x[1], None, need_weights, is_causal=True, return_stats=True)[2]
        for name in ("lse", "entropy", *FIELDS):
            torch.testing.assert_close(getattr(rows, name), getattr(expected, name))
            torch.testing.assert_close(getattr(unbatched, name), getattr(expected, name)[1])


@pytest.mark.parametrize("impl", [*IMPLEMENTATIONS, "weights"])
def test_gradients_of_everything_that_is_learned(impl: str) -> None:
    def build(scale: Any) -> MultiheadAttention:
        return spread(
            MultiheadAttention(
                6,
                2,
                scale=scale,
                sinks=True,
                softcap=1.7,
                qk_norm="rms",
                num_kv_heads=1,
                gate=True,
                rope=RotaryEmbedding(2),
                batch_first=True,
                impl=impl if impl != "weights" else "auto",
                dtype=torch.float64,
            )
        )

    module = build(nn.Parameter(torch.ones(2, dtype=torch.float64)))
    names = list(dict(module.named_parameters()))
    assert {"scale", "sinks", "qk_norm.q_norm.weight"} <= set(names)
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)

    def call(x: Tensor, *parameters: Tensor) -> Any:
        arguments = (x, x, x, None, impl == "weights")
        found = torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), arguments, {"is_causal": True})
        return found[:2] if impl == "weights" else found[0]

    assert torch.autograd.gradcheck(call, (x, *(p.detach().requires_grad_() for p in module.parameters())))
