"""Plain scaled_dot_product_attention in any module: every way to reach it, arguments as given, shapes made 4-D."""

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from attemper.capture import AttentionCall, capture
from tests.capture.watching import agrees

BATCH, HEADS, QUERIES, KEYS, WIDTH = 2, 6, 5, 7, 3


class Attend(nn.Module):
    """Hand-written attention around one of the names of the function."""

    def __init__(self, function: Callable[..., Tensor], **given: Any) -> None:
        super().__init__()
        self.function, self.given = function, given

    def forward(self, *qkv: Tensor) -> Tensor:
        return self.function(*qkv, **self.given)


class Block(nn.Module):
    """A model with its attention one level down."""

    def __init__(self, function: Callable[..., Tensor], **given: Any) -> None:
        super().__init__()
        self.attn = Attend(function, **given)

    def forward(self, *qkv: Tensor) -> Tensor:
        return self.attn(*qkv)


def qkv(*leading: int, heads: int = HEADS, kv_heads: int | None = None, queries: int = QUERIES) -> tuple[Tensor, Tensor, Tensor]:
    kv_heads = heads if kv_heads is None else kv_heads
    key = torch.randn(*leading, kv_heads, KEYS, WIDTH)
    return torch.randn(*leading, heads, queries, WIDTH), key, torch.randn(*leading, kv_heads, KEYS, 4)


def seen(model: nn.Module, *args: Tensor, **kwargs: Any) -> tuple[Tensor, list[AttentionCall]]:
    calls: list[AttentionCall] = []
    torch.manual_seed(1)
    plain = model(*args, **kwargs)
    torch.manual_seed(1)
    with capture(model, calls.append) as captured:
        output = model(*args, **kwargs)
    assert torch.equal(plain, output)
    assert captured.calls == len(calls)
    return output, calls


@pytest.mark.parametrize(
    "function",
    [
        scaled_dot_product_attention,
        torch._C._nn.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention.default,
        lambda q, k, v: F.scaled_dot_product_attention(query=q, key=k, value=v),
    ],
)
def test_every_name_of_the_function_is_seen_once(function: Callable[..., Tensor]) -> None:
    output, (call,) = seen(Block(function), *qkv(BATCH))
    assert (call.module, call.call, call.order, call.seam) == ("attn", 0, 0, "sdpa")
    assert call.scale == pytest.approx(1 / math.sqrt(WIDTH))
    assert call.scale_given is None
    agrees(call, output)


def spread(*shape: int) -> Tensor:
    """Uneven numbers in [-1, 1], the same in every process: tests are collected in several."""
    return torch.sin(11.0 * torch.arange(math.prod(shape))).reshape(shape)


@pytest.mark.parametrize(
    "given",
    [
        {"scale": 0.75},
        {"is_causal": True},
        {"attn_mask": spread(QUERIES, KEYS) < 0.1},
        {"attn_mask": spread(BATCH, 1, QUERIES, KEYS), "scale": 2.0},
        {"attn_mask": spread(BATCH, HEADS, 1, KEYS) < 0.1},
    ],
    ids=["scale", "causal", "bool mask", "float mask and scale", "key mask"],
)
def test_arguments_are_kept_as_given(given: dict[str, Any]) -> None:
    output, (call,) = seen(Block(F.scaled_dot_product_attention, **given), *qkv(BATCH))
    assert call.scale_given == given.get("scale")
    assert call.is_causal == given.get("is_causal", False)
    assert (call.attn_mask is None) == ("attn_mask" not in given)
    agrees(call, output)


def test_fewer_key_heads_stay_fewer() -> None:
    output, (call,) = seen(Block(F.scaled_dot_product_attention, enable_gqa=True), *qkv(BATCH, kv_heads=2))
    assert call.key.shape == (BATCH, 2, KEYS, WIDTH)
    agrees(call, output)


def test_autocast_shows_what_is_multiplied() -> None:
    autocast: list[bool] = []
    model = Block(F.scaled_dot_product_attention)
    with torch.autocast("cpu", torch.bfloat16):
        output, (call,) = seen(model, *qkv(BATCH))
        with capture(model, lambda call: autocast.append(torch.is_autocast_enabled("cpu"))):
            model(*qkv(BATCH))
    assert autocast == [False]
    assert output.dtype == call.query.dtype == call.key.dtype == torch.bfloat16
    assert call.row_stats().lse.dtype == torch.float32
    agrees(call, output)


def test_statistics_are_exact_whatever_autocast_says() -> None:
    _, (call,) = seen(Block(F.scaled_dot_product_attention), *qkv(BATCH))
    exact = call.row_stats()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(call.row_stats().lse, exact.lse)


def test_dropout_draws_the_same_numbers() -> None:
    _, (call,) = seen(Block(F.scaled_dot_product_attention, dropout_p=0.5), *qkv(BATCH))
    assert call.dropout_p == 0.5


@pytest.mark.parametrize(("leading", "shape"), [((), (1, HEADS)), ((BATCH,), (BATCH, HEADS)), ((3, BATCH), (3 * BATCH, HEADS))])
def test_other_numbers_of_dimensions(leading: tuple[int, ...], shape: tuple[int, int]) -> None:
    mask = torch.rand(*leading[-1:], 1, QUERIES, KEYS) < 0.7
    output, (call,) = seen(Block(F.scaled_dot_product_attention, attn_mask=mask), *qkv(*leading))
    assert call.output is not None
    assert torch.equal(call.output.reshape(output.shape), output)
    assert call.query.shape == (*shape, QUERIES, WIDTH)
    agrees(call, output.reshape(*shape, QUERIES, 4))


def test_two_dimensions_are_one_head() -> None:
    q, k, v = torch.randn(QUERIES, WIDTH), torch.randn(KEYS, WIDTH), torch.randn(KEYS, 4)
    output, (call,) = seen(Block(F.scaled_dot_product_attention), q, k, v)
    assert call.query.shape == (1, 1, QUERIES, WIDTH)
    agrees(call, output[None, None])


class Twice(nn.Module):
    """One module under two names, called through both: keyed by its first name and the number of the call."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = Attend(F.scaled_dot_product_attention)

    def forward(self, *given: Tensor) -> Tensor:
        return self.first(*given) + self.second(*given)


def test_a_shared_module_is_keyed_by_its_calls() -> None:
    _, calls = seen(Twice(), *qkv(BATCH))
    assert [(call.module, call.call, call.order) for call in calls] == [("first", 0, 0), ("first", 1, 1)]


def test_a_call_outside_any_module_has_no_name() -> None:
    calls: list[AttentionCall] = []
    with capture(nn.Identity(), calls.append):
        F.scaled_dot_product_attention(*qkv(BATCH))
    assert [call.module for call in calls] == [""]


def test_the_observer_may_attend_too() -> None:
    calls: list[AttentionCall] = []

    def observer(call: AttentionCall) -> None:
        calls.append(call)
        F.scaled_dot_product_attention(call.query, call.key, call.value)
        nn.MultiheadAttention(4, 2)(*[torch.randn(3, 4)] * 3)

    model = Block(F.scaled_dot_product_attention)
    with capture(model, observer) as captured:
        model(*qkv(BATCH))
    assert captured.calls == len(calls) == 1


def test_records_carry_no_gradient_and_observers_build_none() -> None:
    grad: list[bool] = []
    calls: list[AttentionCall] = []

    def observer(call: AttentionCall) -> None:
        calls.append(call)
        grad.append(torch.is_grad_enabled())

    model = Block(F.scaled_dot_product_attention)
    tensors = [each.requires_grad_() for each in qkv(BATCH)]
    with capture(model, observer):
        model(*tensors).sum().backward()
    assert grad == [False]
    assert not calls[0].query.requires_grad
    assert calls[0].query.data_ptr() == tensors[0].data_ptr()  # a view, no copy
    assert tensors[0].grad is not None


def test_nothing_is_read_from_the_device() -> None:
    model = Block(F.scaled_dot_product_attention, attn_mask=torch.ones(QUERIES, KEYS, dtype=torch.bool, device="meta"))
    calls: list[AttentionCall] = []
    with capture(model, calls.append, follow_projections=True):
        model(*(each.to("meta") for each in qkv(BATCH)))  # reading a value of a meta tensor raises
    assert calls[0].query.is_meta
    assert calls[0].query_mask() is None


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage")
def test_nested_tensors_are_reported() -> None:
    model = Block(F.scaled_dot_product_attention)
    nested = torch.nested.nested_tensor(
        [torch.randn(2, HEADS, WIDTH), torch.randn(5, HEADS, WIDTH)], layout=torch.jagged
    ).transpose(1, 2)
    with torch.no_grad(), capture(model, lambda call: None) as captured:
        model(nested, nested, nested)
    assert captured.calls == 0
    assert [(each.module, "nested tensors" in each.reason) for each in captured.unseen()] == [("attn", True)]


def test_the_example_is_checked_without_loading_sympy() -> None:
    code = "import attemper, sys; attemper.check(); sys.exit('sympy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
