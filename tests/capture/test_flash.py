"""The functions of flash_attn, in the form of a stand-in that computes the real thing on the CPU."""

import math
import sys
from collections.abc import Callable, Generator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attemper.capture import AttentionCall, capture
from tests.capture.watching import recompute

BATCH, HEADS, KV_HEADS, QUERIES, KEYS, WIDTH = 2, 4, 2, 5, 7, 8
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def one(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, window: Any, softcap: float, slopes: Any) -> Tensor:
    """[tokens, heads, d] of one sequence, by the definition in the package's own documentation."""
    q, k, v = (each.transpose(0, 1).double() for each in (q, k, v))
    k, v = (each.repeat_interleave(q.shape[0] // k.shape[0], 0) for each in (k, v))
    z = q @ k.mT * (scale or 1 / math.sqrt(q.shape[-1]))
    z = softcap * torch.tanh(z / softcap) if softcap else z
    distance = torch.arange(k.shape[1]) - (torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1])
    z = z if slopes is None else z - slopes[:, None, None] * distance.abs()
    hidden = (distance > 0) & causal
    hidden |= (distance < -window[0]) & (window[0] >= 0)
    hidden |= (distance > window[1]) & (window[1] >= 0)
    return (z.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num() @ v).transpose(0, 1).float()


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None
):  # type: ignore[no-untyped-def]
    rows = zip(q, k, v, strict=True)
    return torch.stack([one(*row, softmax_scale, causal, window_size, softcap, alibi_slopes) for row in rows])


def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0):  # type: ignore[no-untyped-def]
    return flash_attn_func(*qkv.unbind(2), dropout_p, softmax_scale, causal, window_size, softcap)


def flash_attn_varlen_func(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    alibi_slopes=None,
):
    done = []
    for index in range(len(cu_seqlens_q) - 1):
        rows, columns = (slice(*ends[index : index + 2].tolist()) for ends in (cu_seqlens_q, cu_seqlens_k))
        done.append(one(q[rows], k[columns], v[columns], softmax_scale, causal, window_size, 0.0, alibi_slopes))
    return torch.cat(done)


def flash_attn_with_kvcache(  # type: ignore[no-untyped-def]
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    cache_seqlens=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
):
    done = []
    for row, length in enumerate(cache_seqlens.tolist()):
        end = length + k.shape[1]
        k_cache[row, length:end], v_cache[row, length:end] = k[row], v[row]
        done.append(one(q[row], k_cache[row, :end], v_cache[row, :end], softmax_scale, causal, window_size, 0.0, None))
    return torch.stack(done)


_FUNCTIONS = (flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func, flash_attn_with_kvcache)
bound_by_name = flash_attn_func


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> Generator[ModuleType]:
    module = ModuleType("flash_attn")
    for function in _FUNCTIONS:
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    yield module
    assert all(getattr(module, function.__name__) is function for function in _FUNCTIONS)
    assert bound_by_name is flash_attn_func


class Flash(nn.Module):
    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attn = Inner(call)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.attn(*args, **kwargs)


class Inner(nn.Module):
    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.call(*args, **kwargs)


def by_its_name(*args: Any, **kwargs: Any) -> Tensor:
    return bound_by_name(*args, **kwargs)


def tokens(*sizes: int) -> list[Tensor]:
    torch.manual_seed(3)
    return [torch.randn(*sizes, heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def seen(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, AttentionCall]:
    calls: list[AttentionCall] = []
    with torch.no_grad(), capture(model, calls.append) as captured:
        output = model(*args, **kwargs)
    assert captured.unseen() == ()
    (call,) = calls
    assert (call.module, call.seam) == ("attn", "flash")
    return output, call


def agrees(call: AttentionCall, output: Tensor) -> None:
    torch.testing.assert_close(recompute(call).transpose(1, 2), output, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"softmax_scale": 0.3, "causal": True},
        {"window_size": (2, 1)},
        {"softcap": 1.5},
        {"alibi_slopes": SLOPES, "causal": True, "window_size": (3, 0)},
    ],
    ids=["plain", "causal", "window", "softcap", "alibi"],
)
def test_the_plain_function(given: dict[str, Any]) -> None:
    q, _, _ = tokens(BATCH, QUERIES)
    _, k, v = tokens(BATCH, KEYS)
    output, call = seen(Flash(by_its_name), q, k, v, **given)
    assert call.scale_given == given.get("softmax_scale")
    assert call.key.shape == (BATCH, KV_HEADS, KEYS, WIDTH)
    agrees(call, output)


def test_packed_operands_and_a_late_import() -> None:
    def late(qkv: Tensor) -> Tensor:
        from flash_attn import flash_attn_qkvpacked_func as function  # type: ignore[import-not-found]

        return function(qkv, causal=True)

    output, call = seen(Flash(late), torch.randn(BATCH, QUERIES, 3, HEADS, WIDTH))
    agrees(call, output)


@pytest.mark.parametrize("given", [{"causal": True}, {"window_size": (2, -1)}, {"alibi_slopes": SLOPES}], ids=str)
def test_sequences_of_different_lengths(given: dict[str, Any]) -> None:
    ends = [torch.tensor([0, 3, 8, 9]), torch.tensor([0, 5, 12, 13])]
    q, _, _ = tokens(9)
    _, k, v = tokens(13)
    function = Flash(flash_attn_varlen_func)
    output, call = seen(function, q, k, v, *ends, 5, 7, **given)
    assert call.query.shape == (3, HEADS, 5, WIDTH)
    again = recompute(call).transpose(1, 2)
    spread = torch.cat([again[row, : ends[0][row + 1] - ends[0][row]] for row in range(3)])
    torch.testing.assert_close(spread, output, rtol=0, atol=1e-5)


def test_a_cache_of_keys() -> None:
    q, k, v = tokens(BATCH, 2)
    caches = [torch.randn(BATCH, 11, KV_HEADS, WIDTH) for _ in range(2)]
    function = Flash(flash_attn_with_kvcache)
    output, call = seen(function, q, *caches, k, v, cache_seqlens=torch.tensor([4, 9]), causal=True, window_size=(3, -1))
    agrees(call, output)


def test_rotation_inside_is_refused() -> None:
    q, k, v = tokens(BATCH, 2)
    model = Flash(flash_attn_with_kvcache)
    caches = [torch.randn(BATCH, 11, KV_HEADS, WIDTH) for _ in range(2)]
    given = {"cache_seqlens": torch.tensor([4, 9]), "rotary_cos": torch.ones(11, 4)}
    with torch.no_grad(), capture(model, lambda call: None) as captured:
        model(q, *caches, k, v, **given)
    ((name, reason),) = [(each.module, each.reason) for each in captured.unseen()]
    assert name == "attn"
    assert "rotary_cos" in reason
