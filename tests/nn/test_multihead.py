"""In the place of torch's module: weights both ways, its callers, other dtypes, compiled, copied, and the words of errors."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attemper.errors import ArgumentError
from attemper.nn import MultiheadAttention, QKNorm, RotaryEmbedding
from attemper.ops import LISTENERS, Listener
from tests.nn.multihead_cases import BATCH, EMBED, TOKENS, spread

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
