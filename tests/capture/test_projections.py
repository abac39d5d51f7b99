"""The factor on q and k since their projections: measured on real architectures, on every layout, and never guessed."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper.capture import AttentionCall, capture
from tests.capture.architectures import build

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

BATCH, TOKENS, HEADS, KV_HEADS, WIDTH = 2, 7, 6, 2, 8
YARN_32, ROOT = 1.3465736, 6**-0.5


def calls_of(model: nn.Module, *args: Tensor, **kwargs: Tensor) -> list[AttentionCall]:
    calls: list[AttentionCall] = []
    with torch.no_grad(), capture(model, calls.append, follow_projections=True):
        model(*args, **kwargs)
    return calls


@pytest.mark.parametrize(
    ("name", "query", "key"),
    [
        ("llama", (1.0, "unchanged"), (1.0, "unchanged")),
        ("gpt2", (1.0, "unchanged"), (1.0, "unchanged")),  # Conv1D, fused contiguous
        ("gpt_neox", (1.0, "unchanged"), (1.0, "unchanged")),  # fused by head
        ("gpt_bigcode", (1.0, "unchanged"), (1.0, "unchanged")),  # one key head
        ("phi3", (1.0, "unchanged"), (1.0, "unchanged")),  # fused, fewer key heads
        ("falcon", (1.0, "unchanged"), (1.0, "unchanged")),
        ("t5", (1.0, "unchanged"), (1.0, "unchanged")),
        ("swin", (1.0, "unchanged"), (1.0, "unchanged")),  # windows
        ("siglip", (1.0, "unchanged"), (1.0, "unchanged")),  # nn.MultiheadAttention too
        ("whisper", (ROOT, "scaled"), (1.0, "unchanged")),
        ("opt", (ROOT, "scaled"), (1.0, "unchanged")),
        ("esm", (ROOT, "scaled"), (1.0, "unchanged")),
        ("openai_privacy_filter", (10**-0.25 * YARN_32, "scaled"), (10**-0.25 * YARN_32, "scaled")),
        ("gpt_oss", (YARN_32, "scaled"), (YARN_32, "scaled")),
        ("qwen3", (1.0, "normalised"), (1.0, "normalised")),
        ("gemma3", (1.0, "normalised"), (1.0, "normalised")),
        ("olmo2", (1.0, "normalised"), (1.0, "normalised")),
        ("persimmon", (1.0, "normalised"), (1.0, "normalised")),
        ("deepseek_v3", (1.0, "unchanged"), (None, "unknown")),  # the key is put together from two projections
    ],
)
@pytest.mark.parametrize("gain", [1.0, 5.0])
def test_real_architectures(name: str, query: tuple[float, str], key: tuple[float | None, str], gain: float) -> None:
    model, inputs = build(name, gain=gain)
    for weight_name, weight in model.named_parameters():
        if "norm" in weight_name and weight.ndim < 2:
            torch.nn.init.uniform_(weight, 0.5, 2.0)  # so that a normed head has no constant norm
    calls = calls_of(model, **inputs)
    assert calls
    for call in calls:
        assert (call.query_factor, call.query_change) == (pytest.approx(query[0], rel=1e-5), query[1])
        expected = None if key[0] is None else pytest.approx(key[0], rel=1e-5)
        assert (call.key_factor, call.key_change) == (expected, key[1])


@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.bfloat16), ("gpt_oss", torch.bfloat16), ("whisper", torch.float16)])
def test_sixteen_bits(name: str, dtype: torch.dtype) -> None:
    model, inputs = build(name, gain=3.0)
    model.to(dtype)
    inputs = {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}
    expected = {"llama": 1.0, "gpt_oss": YARN_32, "whisper": ROOT}[name]
    for call in calls_of(model, **inputs):
        assert call.query_factor == pytest.approx(expected, rel=4 * torch.finfo(dtype).eps)


def test_only_on_request() -> None:
    model, inputs = build("llama")
    calls: list[AttentionCall] = []
    with torch.no_grad(), capture(model, calls.append):
        model(**inputs)
    assert {(call.query_factor, call.query_change, call.key_factor, call.key_change) for call in calls} == {(None,) * 4}


Layout = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


def heads(tensor: Tensor, count: int) -> Tensor:
    return tensor.unflatten(-1, (count, -1)).transpose(1, 2)


def contiguous(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = x.split((HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH), dim=-1)
    return heads(q, HEADS), heads(k, KV_HEADS), heads(v, KV_HEADS)


def by_head(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = x.unflatten(-1, (HEADS, 3, WIDTH)).permute(3, 0, 2, 1, 4)
    return q, k, v


def by_key_head(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    grouped = x.unflatten(-1, (KV_HEADS, HEADS // KV_HEADS + 2, WIDTH))
    return (
        grouped[..., :-2, :].flatten(2, 3).transpose(1, 2),
        grouped[..., -2, :].transpose(1, 2),
        grouped[..., -1, :].transpose(1, 2),
    )


def all_q_then(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = x.unflatten(-1, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4)
    return q, k, v


class Fused(nn.Module):
    """One projection, split by a layout; factors as given."""

    def __init__(self, features: int, split: Layout, factors: tuple[float, float] = (1.0, 1.0), repeat: bool = False) -> None:
        super().__init__()
        self.qkv = nn.Linear(11, features)
        self.split, self.factors, self.repeat = split, factors, repeat

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.qkv(x))
        if self.repeat:
            k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (k, v))
        q, k = q * self.factors[0], k * self.factors[1]
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, scale=1.0)


@pytest.mark.parametrize(
    ("features", "split", "repeat"),
    [
        ((HEADS + 2 * KV_HEADS) * WIDTH, contiguous, False),
        ((HEADS + 2 * KV_HEADS) * WIDTH, by_key_head, False),
        (3 * HEADS * WIDTH, by_head, False),
        (3 * HEADS * WIDTH, all_q_then, False),
    ],
)
@pytest.mark.parametrize("factors", [(1.0, 1.0), (WIDTH**-0.5, 1.0), (WIDTH**-0.25, WIDTH**-0.25)])
def test_layouts_of_a_fused_projection(features: int, split: Layout, repeat: bool, factors: tuple[float, float]) -> None:
    (call,) = calls_of(Fused(features, split, factors, repeat), torch.randn(BATCH, TOKENS, 11))
    assert (call.query_factor, call.key_factor) == pytest.approx(factors, rel=1e-5)
    assert (call.query_change, call.key_change) == tuple("unchanged" if factor == 1.0 else "scaled" for factor in factors)


class Separate(nn.Module):
    """Separate projections by any Linear-like class, and something done to q before the call."""

    def __init__(self, linear: Callable[[int, int], nn.Module], change: Callable[[Tensor], Tensor], outer: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = linear(11, HEADS * WIDTH), linear(11, KV_HEADS * WIDTH), linear(11, KV_HEADS * WIDTH)
        self.change = change
        self.inner = Inner() if outer else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = heads(self.change(self.q(x)), HEADS), heads(self.k(x), KV_HEADS), heads(self.v(x), KV_HEADS)
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (k, v))
        return self.inner(q, k, v) if self.inner is not None else F.scaled_dot_product_attention(q, k, v)


class Inner(nn.Module):
    """Attention in a module below the one that owns the projections."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class LowRankLinear(nn.Module):
    """A wrapped projection: what counts is its sum, not the linear maps inside."""

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(features, outputs), nn.Linear(features, 2), nn.Linear(2, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 8 * self.up(self.down(x))


class Linear4bit(nn.Linear):
    """The name that quantising libraries use."""


@pytest.mark.parametrize("linear", [nn.Linear, LowRankLinear, Linear4bit])
@pytest.mark.parametrize("outer", [True, False])
def test_kinds_of_projection_and_repeated_keys(linear: Callable[[int, int], nn.Module], outer: bool) -> None:
    (call,) = calls_of(Separate(linear, lambda q: 0.3 * q, outer), torch.randn(BATCH, TOKENS, 11))
    assert (call.query_factor, call.query_change) == (pytest.approx(0.3, rel=1e-5), "scaled")
    assert (call.key_factor, call.key_change) == (pytest.approx(1.0, rel=1e-5), "unchanged")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda q: q + 0.1, "unknown"),
        (lambda q: q * torch.linspace(1, 1.001, TOKENS)[:, None], "by position"),  # by a little
        (lambda q: q * torch.linspace(1, 1.001, HEADS * WIDTH), "unknown"),  # a factor a channel
        (lambda q: F.normalize(q.unflatten(-1, (HEADS, WIDTH)), dim=-1).flatten(2), "normalised"),
        (
            lambda q: q.unflatten(-1, (HEADS, WIDTH)).div(q.unflatten(-1, (HEADS, WIDTH)).norm(dim=-1, keepdim=True)).flatten(2),
            "normalised",
        ),
        (lambda q: F.rms_norm(q, (HEADS * WIDTH,), torch.linspace(0.5, 2, HEADS * WIDTH)), "normalised"),
    ],
)
def test_what_is_no_constant_factor_is_not_called_one(change: Callable[[Tensor], Tensor], word: str) -> None:
    (call,) = calls_of(Separate(nn.Linear, change), torch.randn(BATCH, TOKENS, 11))
    assert call.query_change == word
    assert call.key_change == "unchanged"


def test_a_factor_by_position_is_measured_as_a_curve() -> None:
    wanted = torch.linspace(1, 3, TOKENS)
    (call,) = calls_of(Separate(nn.Linear, lambda q: q * wanted[:, None]), torch.randn(BATCH, TOKENS, 11))
    assert call.query_origin is not None
    assert call.query_origin.curve is not None
    torch.testing.assert_close(call.query_origin.curve, wanted.double().expand(BATCH, TOKENS), rtol=1e-6, atol=0)
    assert call.query_factor is None
    assert call.key_origin is not None
    assert call.key_origin.curve is None


class Turning(Separate):
    """Says that RoPE turns the first dimensions of each head."""

    rotary_ndims = 3


def test_the_turned_part_and_the_rest_are_measured_apart() -> None:
    def stretch(q: Tensor) -> Tensor:
        return q * (1.0 + 0.4 * (torch.arange(HEADS * WIDTH) % WIDTH < Turning.rotary_ndims))

    (call,) = calls_of(Turning(nn.Linear, stretch), torch.randn(BATCH, TOKENS, 11))
    assert call.query_change == "unknown"
    assert call.query_origin is not None
    assert [(part.factor, part.change) for part in call.query_origin.parts] == [
        (pytest.approx(1.4, rel=1e-5), "scaled"),
        (pytest.approx(1.0, rel=1e-5), "unchanged"),
    ]


def test_too_few_numbers_tell_nothing() -> None:
    model = Separate(nn.Linear, lambda q: q)
    (call,) = calls_of(model, torch.randn(1, 1, 11))
    assert (call.query_factor, call.query_change) == (None, "unknown")


def test_without_any_projection_nothing_is_known() -> None:
    (call,) = calls_of(Inner(), *(torch.randn(BATCH, HEADS, TOKENS, WIDTH) for _ in range(3)))
    assert (call.query_factor, call.query_change) == (None, "unknown")


def test_zero_projections_do_not_divide() -> None:
    model = Separate(nn.Linear, lambda q: q)
    for weight in model.parameters():
        torch.nn.init.zeros_(weight)
    (call,) = calls_of(model, torch.randn(BATCH, TOKENS, 11))
    assert (call.query_factor, call.query_change) == (None, "unknown")


def test_projections_are_let_go_at_the_call() -> None:
    outputs: list[weakref.ref[Any]] = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(11, 3 * HEADS * WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            fused = self.qkv(x)
            outputs.append(weakref.ref(fused.untyped_storage()))
            q, k, v = (each.clone() for each in by_head(fused))
            del fused
            output = F.scaled_dot_product_attention(q, k, v)
            assert outputs[0]() is None
            return output

    calls = calls_of(Watched(), torch.randn(BATCH, TOKENS, 11))
    assert outputs[0]() is None
    assert calls[0].query_change == "unchanged"
