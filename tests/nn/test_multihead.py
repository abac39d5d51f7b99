"""What the grid leaves out: weights both ways, empty rows, dropout, every option beyond torch's, and the words of errors."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper
from attemper import scales
from attemper.errors import ArgumentError
from attemper.nn import MultiheadAttention, QKNorm, RotaryEmbedding, YarnRope
from attemper.ops import LISTENERS, Listener, row_stats
from attemper.stats import FIELDS

IMPLEMENTATIONS = ("reference", "blocked", "cpu")
BATCH, TOKENS, EMBED = 2, 7, 12


def spread(module: nn.Module, std: float = 0.4) -> Any:
    """Every parameter drawn anew: none at 0 or 1, where it would not show."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std)
    return module


def heads_of(module: MultiheadAttention, x: Tensor) -> list[Tensor]:
    """q, k and v of self-attention, [batch, heads, tokens, width], by the definition; for heads of one width."""
    inner = sum(module.layout.widths)
    kv_inner = sum(module.layout.kv_widths)
    assert module.in_proj_weight is not None
    parts = F.linear(x, module.in_proj_weight, module.in_proj_bias).split([inner, kv_inner, kv_inner], -1)
    return [part.unflatten(-1, (-1, module.head_dim or 0)).transpose(1, 2) for part in parts]


def finish(module: MultiheadAttention, heads: Tensor) -> Tensor:
    return module.out_proj(heads.transpose(1, 2).flatten(2))


OPTIONS = [
    {},
    {"bias": False},
    {"add_bias_kv": True},
    {"kdim": 5, "vdim": 7},
    {"kdim": 5, "vdim": 7, "bias": False, "add_bias_kv": True, "add_zero_attn": True},
    {"dtype": torch.bfloat16},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_weights_load_both_ways_and_a_seed_gives_the_same_ones(options: dict[str, Any]) -> None:
    torch.manual_seed(3)
    theirs = nn.MultiheadAttention(EMBED, 3, **options)
    torch.manual_seed(3)
    ours = MultiheadAttention(EMBED, 3, **options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name
    spread(ours)
    theirs.load_state_dict(ours.state_dict())
    spread(ours)
    ours.load_state_dict(theirs.state_dict())
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name


def test_options_add_their_parameters_and_no_others() -> None:
    plain = set(MultiheadAttention(EMBED, 3).state_dict())
    module = MultiheadAttention(
        EMBED, 3, sinks=True, qk_norm="rms", rope=RotaryEmbedding(4), scale=nn.Parameter(torch.ones(3)), softcap=2.0, gate=True
    )
    added = {"sinks", "qk_norm.q_norm.weight", "qk_norm.k_norm.weight", "scale", "gate_proj.weight", "gate_proj.bias"}
    assert set(module.state_dict()) - plain == added
    assert not plain - set(module.state_dict())
    assert set(MultiheadAttention(EMBED, 3, scale=torch.ones(3)).state_dict()) == plain


def test_it_takes_over_the_very_parameters_of_torchs_module() -> None:
    theirs = spread(nn.MultiheadAttention(EMBED, 3, kdim=5, batch_first=True, add_bias_kv=True)).eval()
    ours = MultiheadAttention.from_torch(theirs, softcap=1e6)
    assert all(ours.get_parameter(name) is parameter for name, parameter in theirs.named_parameters())
    assert not ours.training
    query, key, value = torch.randn(BATCH, TOKENS, EMBED), torch.randn(BATCH, 3, 5), torch.randn(BATCH, 3, EMBED)
    torch.testing.assert_close(ours(query, key, value), theirs(query, key, value))
    with pytest.raises(ArgumentError, match=r"options: got in_proj_weight of shape \(20, 12\); expected \(36, 12\)"):
        MultiheadAttention.from_torch(nn.MultiheadAttention(EMBED, 3), num_kv_heads=1)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("source", ["padding", "mask"])
def test_rows_without_a_key_give_heads_of_0(source: str, training: bool, need_weights: bool) -> None:
    theirs = spread(nn.MultiheadAttention(EMBED, 2, batch_first=True)).train(training)
    ours = MultiheadAttention.from_torch(theirs)
    x = torch.randn(BATCH, TOKENS, EMBED)
    if source == "padding":
        arguments: dict[str, Any] = {"key_padding_mask": torch.tensor([[False] * TOKENS, [True] * TOKENS])}
        empty = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
        empty[1] = True
    else:
        arguments = {"attn_mask": torch.arange(TOKENS).unsqueeze(-1).expand(TOKENS, TOKENS) == 3}
        empty = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
        empty[:, 3] = True
    with torch.no_grad():
        output, weights = ours(x, x, x, need_weights=need_weights, **arguments)
        torch_output, torch_weights = theirs(x, x, x, need_weights=need_weights, **arguments)
    assert torch.equal(output[empty], ours.out_proj.bias.expand_as(output[empty]))
    torch.testing.assert_close(output[~empty], torch_output[~empty])
    # The difference: torch's own answer depends on the path.
    if need_weights or not training:
        assert torch_output[empty].isnan().all()
    else:
        torch.testing.assert_close(torch_output[empty], output[empty])
    if weights is not None:
        assert not weights[empty].any()
        assert torch_weights[empty].isnan().all()


def test_empty_rows_send_back_gradients_of_0() -> None:
    module = spread(MultiheadAttention(EMBED, 2, batch_first=True))
    x = torch.randn(BATCH, TOKENS, EMBED, requires_grad=True)
    hidden = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    for need_weights in (True, False):
        output, _ = module(x, x, x, hidden, need_weights)
        gradients = torch.autograd.grad(output.sum(), [x, *module.parameters()], materialize_grads=True)
        assert all(torch.isfinite(gradient).all() for gradient in gradients)
        assert not gradients[0].any()


def test_a_bool_mask_beside_a_float_one_hides_as_in_torch() -> None:
    theirs = spread(nn.MultiheadAttention(EMBED, 3))
    ours = MultiheadAttention.from_torch(theirs)
    x, added, padding = torch.randn(TOKENS, BATCH, EMBED), torch.randn(TOKENS, TOKENS), torch.arange(TOKENS).expand(BATCH, -1) > 4
    with pytest.warns(UserWarning, match="mismatched key_padding_mask and attn_mask is deprecated"):
        expected = theirs(x, x, x, padding, attn_mask=added)
    torch.testing.assert_close(ours(x, x, x, padding, attn_mask=added), expected)


def test_a_float_mask_gets_gradients() -> None:
    theirs = spread(nn.MultiheadAttention(EMBED, 3, dtype=torch.float64))
    ours = MultiheadAttention.from_torch(theirs)
    x, mask = (torch.randn(*shape, dtype=torch.float64) for shape in ((TOKENS, BATCH, EMBED), (TOKENS, TOKENS)))
    mask.requires_grad_()
    expected, *found = (
        torch.autograd.grad(module(x, x, x, attn_mask=mask, need_weights=need)[0].square().sum(), mask)[0]
        for module, need in ((theirs, True), (ours, True), (ours, False))
    )
    for each in found:
        torch.testing.assert_close(each, expected)


@pytest.mark.parametrize("extras", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"add_bias_kv": True, "add_zero_attn": True}])
def test_extra_keys_stay_visible_under_the_causal_rule(extras: dict[str, bool]) -> None:
    theirs = spread(nn.MultiheadAttention(EMBED, 3, **extras))
    ours = MultiheadAttention.from_torch(theirs)
    x = torch.randn(TOKENS, BATCH, EMBED)
    later = torch.ones(TOKENS, TOKENS).triu(1).bool()
    expected = theirs(x, x, x, attn_mask=later, is_causal=True)[0]
    for need_weights in (True, False):
        torch.testing.assert_close(ours(x, x, x, attn_mask=later, is_causal=True, need_weights=need_weights)[0], expected)
        torch.testing.assert_close(ours(x, x, x, is_causal=True, need_weights=need_weights)[0], expected)
        torch.testing.assert_close(ours(x, x, x, attn_mask=later, need_weights=need_weights)[0], expected)
    # The difference: with the hint and without weights torch drops the mask, and its causal rule hides the extra keys.
    hinted = theirs(x, x, x, attn_mask=later, is_causal=True, need_weights=False)[0]
    assert (hinted - expected).abs().max() > 0.01


def test_the_causal_rule_needs_no_mask_and_joins_any() -> None:
    module = spread(MultiheadAttention(EMBED, 3, batch_first=True))
    x, padding = torch.randn(BATCH, TOKENS, EMBED), torch.arange(TOKENS).expand(BATCH, -1) > 4
    later = torch.ones(TOKENS, TOKENS).triu(1).bool()
    for need_weights in (True, False):
        expected = module(x, x, x, padding, need_weights, later)[0]
        torch.testing.assert_close(module(x, x, x, padding, need_weights, is_causal=True)[0], expected)
    # One query at a time, with its place.
    whole = module(x, x, x, is_causal=True)[0]
    for place in range(TOKENS):
        step = module(x[:, place : place + 1], x, x, need_weights=False, is_causal=True, offset=place)[0]
        torch.testing.assert_close(step[:, 0], whole[:, place])


def test_what_torch_does_with_is_causal_depends_on_the_path_and_ours_does_not() -> None:
    theirs = spread(nn.MultiheadAttention(EMBED, 3))
    ours = MultiheadAttention.from_torch(theirs)
    x, mask = torch.randn(TOKENS, BATCH, EMBED), torch.arange(TOKENS * TOKENS).reshape(TOKENS, TOKENS) % 5 == 3
    with pytest.raises(RuntimeError, match="Need attn_mask if specifying the is_causal hint"):
        theirs(x, x, x, is_causal=True, need_weights=False)
    # A wrong hint: the mask alone, or the causal rule alone.
    later = torch.ones(TOKENS, TOKENS).triu(1).bool()
    torch.testing.assert_close(theirs(x, x, x, attn_mask=mask, is_causal=True)[0], theirs(x, x, x, attn_mask=mask)[0])
    dropped = theirs(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
    torch.testing.assert_close(dropped, theirs(x, x, x, attn_mask=later)[0])
    for need_weights in (True, False):
        both = ours(x, x, x, attn_mask=mask, is_causal=True, need_weights=need_weights)[0]
        torch.testing.assert_close(both, theirs(x, x, x, attn_mask=mask | later)[0])


def test_the_most_negative_number_hides() -> None:
    theirs = spread(nn.MultiheadAttention(EMBED, 3))
    ours = MultiheadAttention.from_torch(theirs)
    x, mask = torch.randn(TOKENS, BATCH, EMBED), torch.zeros(TOKENS, TOKENS)
    mask[:, 2] = mask[3] = torch.finfo(torch.float32).min
    (expected, uniform), (output, weights) = (module(x, x, x, attn_mask=mask) for module in (theirs, ours))
    others = torch.arange(TOKENS) != 3
    torch.testing.assert_close(output[others], expected[others])
    torch.testing.assert_close(uniform[:, 3], torch.full((BATCH, TOKENS), 1 / TOKENS))  # the difference
    assert not weights[:, 3].any()


def test_dropout_drops_the_same_weights_with_and_without_returning_them() -> None:
    module = spread(MultiheadAttention(EMBED, 3, dropout=0.4, batch_first=True))
    x = torch.randn(BATCH, TOKENS, EMBED)
    torch.manual_seed(11)
    output, weights = module(x, x, x, average_attn_weights=False)
    torch.manual_seed(11)
    torch.testing.assert_close(module(x, x, x, need_weights=False)[0], output)
    # As in torch, what is returned is what met the values.
    assert 0.2 < (weights == 0.0).float().mean() < 0.6
    torch.testing.assert_close(finish(module, weights @ heads_of(module, x)[2]), output)
    assert not torch.equal(module(x, x, x)[0], output)
    module.eval()
    assert torch.equal(module(x, x, x)[0], module(x, x, x)[0])
    torch.testing.assert_close(module(x, x, x)[1].sum(-1), torch.ones(BATCH, TOKENS))


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


def test_it_stands_in_torchs_encoder_layer_and_its_options_are_kept() -> None:
    layer = nn.TransformerEncoderLayer(EMBED, 2, 17, batch_first=True, dropout=0.0).eval()
    x, padding = torch.randn(BATCH, TOKENS, EMBED), torch.arange(TOKENS).expand(BATCH, -1) > 4
    with torch.no_grad():
        fused = layer(x, src_key_padding_mask=padding)
        layer.self_attn = MultiheadAttention.from_torch(layer.self_attn)  # type: ignore[assignment]
        torch.testing.assert_close(layer(x, src_key_padding_mask=padding), fused)
        layer.self_attn.softcap = 0.01
        assert (layer(x, src_key_padding_mask=padding) - fused).abs().max() > 0.001


def test_its_calls_are_told_whichever_path_they_take() -> None:
    told = []

    listener = Listener(lambda problem, rows: told.append((problem.inputs.query.shape, problem.scale)))

    module, x = MultiheadAttention(EMBED, 3, scale=0.2), torch.randn(TOKENS, BATCH, EMBED)
    LISTENERS.append(listener)
    try:
        module(x, x, x, need_weights=True)
        module(x, x, x, need_weights=False)
    finally:
        LISTENERS.remove(listener)
    assert told == [(torch.Size([BATCH, 3, TOKENS, 4]), 0.2)] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_stay_within_torchs_error(dtype: torch.dtype) -> None:
    theirs = spread(nn.MultiheadAttention(EMBED, 3)).to(dtype)
    ours, oracle = MultiheadAttention.from_torch(theirs), copy.deepcopy(theirs).double()
    x = torch.randn(31, 11, EMBED, dtype=dtype)
    for need_weights in (True, False):
        exact, peer, own = (
            module(x.to(module.out_proj.weight.dtype), *[x.to(module.out_proj.weight.dtype)] * 2, need_weights=need_weights)
            for module in (oracle, theirs, ours)
        )
        for wide, their, our in zip(exact, peer, own, strict=True):
            if our is not None:
                assert our.dtype == their.dtype == dtype
                allowed = 2 * (their.double() - wide).abs().max() + torch.finfo(dtype).eps * wide.abs().max()
                assert (our.double() - wide).abs().max() <= allowed


@pytest.mark.parametrize("need_weights", [True, False])
def test_autocast_works_as_in_torch(need_weights: bool) -> None:
    theirs = spread(nn.MultiheadAttention(EMBED, 3, add_bias_kv=True))
    ours, x = MultiheadAttention.from_torch(theirs, sinks=False), torch.randn(TOKENS, BATCH, EMBED)
    with torch.autocast("cpu", torch.bfloat16):
        (expected, _), (output, _) = (module(x, x, x, need_weights=need_weights) for module in (theirs, ours))
    assert output.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(output, expected, rtol=0.05, atol=0.05)


def test_it_compiles_without_a_break() -> None:
    module = spread(MultiheadAttention(EMBED, 3, rope=RotaryEmbedding(4), qk_norm="rms", sinks=True, softcap=2.0))
    x = torch.randn(TOKENS, BATCH, EMBED)

    def run(x: Tensor) -> Tensor:
        return module(x, x, x, need_weights=False, is_causal=True)[0]

    torch.testing.assert_close(torch.compile(run, backend="aot_eager", fullgraph=True)(x), run(x))


def test_a_copy_and_a_cast_work_alike() -> None:
    module = spread(MultiheadAttention(EMBED, 3, rope=RotaryEmbedding(4), qk_norm="rms", head_dims=(4, 6, 4), sinks=True))
    x = torch.randn(TOKENS, BATCH, EMBED)
    assert torch.equal(copy.deepcopy(module)(x, x, x)[0], module(x, x, x)[0])
    torch.testing.assert_close(copy.deepcopy(module).double()(*[x.double()] * 3)[0].float(), module(x, x, x)[0])


x = torch.zeros(TOKENS, BATCH, EMBED)  # for the tables below


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embed_dim": 13}, r"embed_dim: got 13; expected a multiple of num_heads = 3"),
        ({"num_heads": 0}, r"num_heads: got 0; expected a whole number above 0"),
        ({"dropout": 1.5}, r"dropout: got 1.5; expected a probability"),
        ({"num_kv_heads": 2}, r"num_kv_heads: got 2; expected a divisor of num_heads = 3"),
        ({"head_dims": (4, 5)}, r"head_dims: got 2 widths \(4, 5\); expected num_heads = 3 of them"),
        ({"head_dims": (4, 5, 4), "num_kv_heads": 1}, r"head_dims: got \(4, 5, 4\); expected the same width for the 3 heads"),
        ({"head_dims": (4, 0, 4)}, r"head_dims: got 0; expected a whole number above 0"),
        ({"rope": RotaryEmbedding(6)}, r"rope: got width 6; expected at most 4, the narrowest head"),
        ({"qk_norm": "batch"}, r"kind: got 'batch'; expected one of 'rms', 'layer', 'l2'"),
        ({"impl": "fast"}, r"impl: got 'fast'; expected one of 'auto', 'reference'"),
        ({"qk_norm": QKNorm(5)}, r"qk_norm: got a QKNorm of 5 for heads of \(4, 4, 4\); expected heads of 5"),
    ],
    ids=lambda thing: next(iter(thing)) if isinstance(thing, dict) else "",
)
def test_options_that_do_not_fit_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        MultiheadAttention(**{"embed_dim": EMBED, "num_heads": 3} | options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"query": x[..., :5]}, r"query: got shape \(7, 2, 5\); expected \[tokens, batch, 12\]"),
        ({"key": x[0]}, r"key: got shape \(2, 12\); expected 3 dimensions, as query has"),
        ({"key": x[:, :1], "value": x[:, :1]}, r"key: got a batch of 1; expected 2, as query has"),
        ({"value": x[:3]}, r"value: got shape \(3, 2, 12\); expected \(7, 2, 12\)"),
        ({"query": x.double()}, r"query: got torch.float64; expected torch.float32, the dtype of the parameters"),
        ({"query": None}, r"query: got NoneType; expected a torch.Tensor"),
        ({"attn_mask": torch.zeros(7, 6)}, r"attn_mask: got shape \(7, 6\); expected \(7, 7\) or \(6, 7, 7\)"),
        ({"attn_mask": torch.zeros(7, 7).long()}, r"attn_mask: got torch.int64; expected bool \(True = hidden\)"),
        ({"key_padding_mask": torch.zeros(7, 2)}, r"key_padding_mask: got shape \(7, 2\); expected \(2, 7\)"),
        ({"key_padding_mask": 3}, r"key_padding_mask: got int; expected a bool or float torch.Tensor"),
        (
            {"query": torch.nested.nested_tensor([x[0], x[0]], layout=torch.jagged)},
            r"query: got a nested tensor; expected a dense tensor; set use_nested_tensor = False",
        ),
    ],
    ids=lambda thing: next(iter(thing)) if isinstance(thing, dict) else "",
)
def test_arguments_that_do_not_fit_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        MultiheadAttention(EMBED, 3)(**{"query": x, "key": x, "value": x} | arguments)
