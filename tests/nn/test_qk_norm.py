"""QKNorm against torch's norms and the models that it is named after; the bound that it puts on logits."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from attemper.errors import ArgumentError
from attemper.nn import QKNorm

BATCH, HEADS, KV_HEADS, QUERIES, KEYS, D = 2, 6, 3, 5, 7, 11


def draw(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, HEADS, QUERIES, D, dtype=dtype), 3.0 * torch.randn(BATCH, KV_HEADS, KEYS, D, dtype=dtype) + 1.0


def spread(norm: QKNorm) -> QKNorm:
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm


@pytest.mark.parametrize("kind", ["rms", "layer", "l2"])
def test_each_kind_has_its_formula(kind: str) -> None:
    norm = QKNorm(D, kind, gain=False, eps=0.01)
    formulas = {
        "rms": lambda x: x / (x.square().mean(-1, keepdim=True) + 0.01).sqrt(),
        "layer": lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 0.01).sqrt(),
        "l2": lambda x: x / x.norm(dim=-1, keepdim=True).clamp(min=0.01),
    }
    assert not list(norm.parameters())
    query, key = draw(torch.float64)
    for x, own in zip((query, key), norm(query, key), strict=True):
        assert own.dtype == torch.float64
        torch.testing.assert_close(own, formulas[kind](x))


def theirs(name: str, heads: int) -> Any:
    """A model's own norm, and how it is applied to [batch, heads, tokens, d]."""
    if name == "qwen3":
        norm: Any = Qwen3RMSNorm(D, eps=1e-5)
    elif name == "gemma3":
        norm = Gemma3RMSNorm(D, eps=1e-5)
    elif name == "cohere":
        norm = CohereLayerNorm((heads, D), eps=1e-5)
        return norm, lambda x: norm(x.transpose(1, 2)).transpose(1, 2)
    else:
        norm = Olmo2RMSNorm(heads * D, eps=1e-5)
        return norm, lambda x: norm(x.transpose(1, 2).flatten(2)).unflatten(2, (heads, D)).transpose(1, 2)
    return norm, norm


MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gemma3": {"zero_centred": True},
    "cohere": {"kind": "layer", "gain": "head"},
    "olmo2": {"over": "all"},
}


@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_norm_of_that_model_and_takes_its_weights(name: str) -> None:
    ours = spread(QKNorm(D, num_heads=HEADS, num_kv_heads=KV_HEADS, eps=1e-5, **MODELS[name]))
    query, key = draw()
    for x, own, part, heads in zip((query, key), ours(query, key), (ours.q_norm, ours.k_norm), (HEADS, KV_HEADS), strict=True):
        norm, apply = theirs(name, heads)
        norm.load_state_dict(part.state_dict())
        torch.testing.assert_close(own, apply(x))


def test_gains_start_at_one() -> None:
    query, key = draw()
    plain = QKNorm(D, gain=False)(query, key)
    for options in ({}, {"zero_centred": True}, {"gain": "head"}, {"bias": True}):
        torch.testing.assert_close(QKNorm(D, num_heads=HEADS, num_kv_heads=KV_HEADS, **options)(query, key), plain)


def test_a_bias_is_added_after_the_gain() -> None:
    norm = spread(QKNorm(D, "layer", bias=True))
    query, key = draw()
    expected = F.layer_norm(query, (D,), norm.q_norm.weight, norm.q_norm.bias, norm.eps)
    torch.testing.assert_close(norm(query, key)[0], expected)


@pytest.mark.parametrize("kind", ["rms", "layer", "l2"])
@pytest.mark.parametrize("over", ["head", "all"])
def test_the_logits_are_bounded_whatever_comes_in(kind: str, over: str) -> None:
    norm = QKNorm(D, kind, over=over, num_heads=HEADS, num_kv_heads=KV_HEADS)
    query, key = (1e4 * x for x in draw())
    q, k = norm(query, key)
    products = q @ k.repeat_interleave(HEADS // KV_HEADS, 1).mT
    bound = {"rms": D, "layer": D, "l2": 1}[kind]
    if over == "all":
        bound *= {"rms": HEADS * KV_HEADS, "layer": HEADS * KV_HEADS, "l2": 1}[kind] ** 0.5
    assert products.abs().max() <= bound * (1 + 1e-5)


def test_a_vector_of_zeros_stays_finite_forward_and_backward() -> None:
    for kind in ("rms", "layer", "l2"):
        x = torch.zeros(2, 3, 5, requires_grad=True)
        q, k = QKNorm(5, kind)(x, x)
        (gradient,) = torch.autograd.grad((q + k).sum(), x)
        assert torch.isfinite(gradient).all()
        assert not q.any()


def test_sixteen_bits_are_normalised_in_float32() -> None:
    query, key = (x.half() * 300 for x in draw())  # squares overflow in float16
    q, _ = QKNorm(D)(query, key)
    assert q.dtype == torch.float16
    torch.testing.assert_close(q.float(), QKNorm(D)(query.float(), key.float())[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("options", [*MODELS.values(), {"kind": "l2"}, {"kind": "layer", "bias": True, "over": "all"}], ids=str)
def test_gradients(options: dict[str, Any]) -> None:
    norm = spread(QKNorm(3, num_heads=4, num_kv_heads=2, dtype=torch.float64, **options))
    names = list(dict(norm.named_parameters()))
    query, key = torch.randn(2, 4, 2, 3, dtype=torch.float64), torch.randn(2, 2, 2, 3, dtype=torch.float64)

    def call(query: Tensor, key: Tensor, *parameters: Tensor) -> Any:
        return torch.func.functional_call(norm, dict(zip(names, parameters, strict=True)), (query, key))

    leaves = (query, key, *norm.parameters())
    assert torch.autograd.gradcheck(call, tuple(leaf.detach().requires_grad_() for leaf in leaves))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "batch"}, r"kind: got 'batch'; expected one of 'rms', 'layer', 'l2'"),
        ({"over": "tokens"}, r"over: got 'tokens'; expected one of 'head', 'all'"),
        ({"over": "all"}, r"num_heads: got None; expected the number of query heads"),
        ({"gain": "all"}, r"gain: got 'all'; expected True, False or 'head'"),
        ({"eps": 0.0}, r"eps: got 0.0; expected a number above 0"),
    ],
)
def test_options_that_do_not_fit_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        QKNorm(D, **options)


def test_inputs_that_do_not_fit_are_named() -> None:
    query, key = draw()
    with pytest.raises(ArgumentError, match=r"key: got shape \(2, 3, 7, 10\); expected \[..., heads, tokens, 11\]"):
        QKNorm(D)(query, key[..., 1:])
    with pytest.raises(ArgumentError, match="query: got 6 heads; expected 5, as the norm was built for"):
        QKNorm(D, gain="head", num_heads=5)(query, key)
