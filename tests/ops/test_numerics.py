"""Inputs on which other kernels failed: each with what must hold, on every implementation."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attemper import attention
from attemper.ops import row_stats
from tests.attention_cases import every_implementation


def tensor_of(recipe: dict[str, Any], shape: list[int], dtype: torch.dtype) -> Tensor:
    """A tensor by its recipe in the shared cases."""
    if "fill" in recipe:
        return torch.full(shape, recipe["fill"], dtype=dtype)
    torch.manual_seed(recipe["seed"])
    if "uniform" in recipe:
        low, high = recipe["uniform"]
        return (low + (high - low) * torch.rand(shape)).to(dtype)
    tensor = (recipe.get("factor", 1.0) * torch.randn(shape)).to(dtype)
    if recipe.get("expand_head"):
        tensor = tensor[:, :1].expand(shape)
    if "nan_at" in recipe:
        tensor[tuple(recipe["nan_at"])] = math.nan
    return tensor


class Numerics:
    """The shared cases by id."""

    def __init__(self, folder: Path) -> None:
        self.by_id = {case["id"]: case for case in json.loads((folder / "numerics.json").read_text())}

    def load(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        case = self.by_id[name]
        dtype = getattr(torch, case["dtype"])
        shape = case.get("shape", case.get("q_shape"))
        kv_shape = case.get("shape", case.get("kv_shape"))
        return tensor_of(case["q"], shape, dtype), tensor_of(case["k"], kv_shape, dtype), tensor_of(case["v"], kv_shape, dtype)


@pytest.fixture(scope="module")
def numerics(cases: Path) -> Numerics:
    return Numerics(cases)


def exact(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
    return attention(query.double(), key.double(), value.double(), impl="reference", **arguments)


@every_implementation
def test_products_beyond_half_precision_are_no_matter(numerics: Numerics, impl: str) -> None:
    query, key, value = numerics.load("fp16-product-overflow")
    output, rows = attention(query, key, value, return_stats=True, impl=impl)
    mean = value.double().mean(-2, keepdim=True).expand(value.shape)
    torch.testing.assert_close(output.double(), mean, rtol=0, atol=1e-3)
    assert (rows.product_max == 102400.0).all()
    assert (rows.headroom(torch.float16) < 1.0).all()


@every_implementation
@pytest.mark.parametrize("name", ["bf16-rounded-max", "bf16-rounded-max-many-keys"])
def test_the_maximum_is_not_rounded(numerics: Numerics, name: str, impl: str) -> None:
    query, key, value = numerics.load(name)
    output, rows = attention(query, key, value, return_stats=True, impl=impl)
    keys = key.shape[-2]
    torch.testing.assert_close(output.float(), value.float().mean(-2, keepdim=True).expand(value.shape), rtol=2**-7, atol=2**-9)
    torch.testing.assert_close(rows.entropy, torch.full_like(rows.entropy, math.log(keys)))
    torch.testing.assert_close(rows.p2, torch.full_like(rows.p2, 1.0 / keys))


@every_implementation
def test_large_negative_half_precision_inputs(numerics: Numerics, impl: str) -> None:
    query, key, value = numerics.load("fp16-minus-900")
    output = attention(query, key, value, impl=impl)
    assert torch.isfinite(output).all()
    assert (output <= value.amax(-2, keepdim=True)).all()
    assert (output >= value.amin(-2, keepdim=True)).all()


@every_implementation
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_a_fully_masked_row_is_nought_and_sends_nought(numerics: Numerics, impl: str) -> None:
    query, key, value = (tensor.requires_grad_() for tensor in numerics.load("fully-masked-row"))
    mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool)
    mask[0] = False
    with torch.autograd.detect_anomaly(check_nan=True):
        output, rows = attention(query, key, value, mask, return_stats=True, impl=impl)
        (output.square().sum() + rows.entropy.sum() + rows.lse[..., 1:].sum()).backward()
    assert not output[:, :, 0].any()
    assert query.grad is not None
    assert not query.grad[:, :, 0].any()
    assert all(torch.isfinite(x).all() for x in (output, query.grad, key.grad, value.grad) if x is not None)
    assert not rows.count[:, :, 0].any()
    assert (rows.lse[:, :, 0] == -math.inf).all()
    assert (rows.max[:, :, 0] == -math.inf).all()
    assert not rows.entropy[:, :, 0].any()


@every_implementation
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_masked_does_not_leak(numerics: Numerics, impl: str, poison: float) -> None:
    query, key, value = numerics.load("masked-nan")
    clean_key, clean_value = torch.nan_to_num(key), torch.nan_to_num(value)
    key, value = (torch.where(torch.isnan(x), poison, x) for x in (key, value))
    mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool)
    mask[:, 3] = False

    def run(*tensors: Tensor) -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        output, rows = attention(*leaves, mask, return_stats=True, impl=impl)
        gradients = torch.autograd.grad(output.sin().sum() + rows.lse.sum() + rows.entropy.sum(), leaves)
        return [output, rows.lse, rows.entropy, rows.rest, *gradients]

    for poisoned, clean in zip(run(query, key, value), run(query, clean_key, clean_value), strict=True):
        torch.testing.assert_close(poisoned, clean)


@every_implementation
def test_what_is_visible_to_one_row_reaches_that_row_alone(impl: str) -> None:
    query, key, value = (torch.randn(1, 1, 5, 7) for _ in range(3))
    value[0, 0, 3, 2] = math.inf
    key[0, 0, 4, 1] = math.nan
    output = attention(query, key, value, is_causal=True, impl=impl)
    assert torch.isfinite(output[0, 0, :3]).all()
    assert output[0, 0, 3, 2] == math.inf
    assert torch.isfinite(output[0, 0, 3, :2]).all()
    assert torch.isnan(output[0, 0, 4]).all()


@every_implementation
def test_a_float_mask_is_not_scaled(numerics: Numerics, impl: str) -> None:
    query, key, value = numerics.load("bias-not-scaled")
    bias = 6.0 * torch.rand(query.shape[-2], key.shape[-2]) - 3.0
    expected = torch.softmax(0.125 * query.double() @ key.double().mT + bias, -1) @ value.double()
    output = attention(query, key, value, bias, scale=0.125, impl=impl)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-6)


@every_implementation
def test_entropy_keeps_its_digits_at_large_logits(numerics: Numerics, impl: str) -> None:
    query, key, value = numerics.load("entropy-large-logits")
    _, rows = attention(query, key, value, scale=1.0, return_stats=True, impl=impl)
    truth = row_stats(query.double(), key.double(), scale=1.0, impl="reference").entropy
    logits = query @ key.mT
    eager_p = torch.softmax(logits, -1)
    shifted = logits - logits.amax(-1, keepdim=True)
    eager = torch.log(torch.exp(shifted).sum(-1)) - (eager_p * shifted).sum(-1)
    budget = 2.0 * (eager.double() - truth).abs().max() + 2**-23 * truth.abs().max()
    assert (rows.entropy.double() - truth).abs().max() <= budget


@every_implementation
def test_the_scale_reaches_output_and_gradient(numerics: Numerics, impl: str) -> None:
    query, key, value = (tensor.requires_grad_() for tensor in numerics.load("scale-reaches-gradient"))
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    inputs = (query, key, value, scale)
    assert torch.autograd.gradcheck(lambda q, k, v, s: attention(q, k, v, scale=s, impl=impl), inputs)
    assert not torch.allclose(
        attention(query, key, value, scale=0.7, impl=impl), attention(query, key, value, scale=0.5, impl=impl)
    )


@every_implementation
@pytest.mark.parametrize("sink", [0.0, 12.0, 30.0])
def test_the_gradient_of_the_scale_beside_a_sink_that_takes_all(sink: float, impl: str) -> None:
    # All keys together weigh e^-12, e^-30: their share in the gradient of lse is not to be had as 1 less that of the sink.
    query, key, value = (torch.randn(1, 2, n, 7) for n in (5, 11, 11))

    def gradient(dtype: torch.dtype, impl: str) -> Tensor:
        scale = torch.tensor([0.4, 0.7], dtype=dtype, requires_grad=True)
        sinks = torch.full((2,), sink, dtype=dtype)
        tensors = (tensor.to(dtype) for tensor in (query, key, value))
        output, rows = attention(*tensors, scale=scale, sinks=sinks, return_stats=True, impl=impl)
        return torch.autograd.grad(output.sum() + rows.lse.sum(), scale)[0]

    torch.testing.assert_close(gradient(torch.float32, impl).double(), gradient(torch.float64, "reference"), rtol=5e-6, atol=0.0)


@every_implementation
def test_causal_is_aligned_top_left(numerics: Numerics, impl: str) -> None:
    query, key, value = numerics.load("single-query-causal")
    output, rows = attention(query, key, value, is_causal=True, return_stats=True, impl=impl)
    torch.testing.assert_close(output, value[:, :, :1])
    assert (rows.count == 1).all()
    torch.testing.assert_close(output, torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True))
    _, rows = attention(query, key, value, is_causal=True, offset=8, return_stats=True, impl=impl)
    assert (rows.count == 9).all()


@every_implementation
def test_expanded_heads_are_read_in_place(numerics: Numerics, impl: str) -> None:
    query, key, value = numerics.load("expanded-kv")
    assert key.stride(1) == 0
    torch.testing.assert_close(
        attention(query, key, value, impl=impl), attention(query, key.contiguous(), value.contiguous(), impl=impl), rtol=0, atol=0
    )


@every_implementation
def test_softcap_bounds_the_logits(numerics: Numerics, impl: str) -> None:
    query, key, value = numerics.load("softcap-bounds")
    leaves = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    output, rows = attention(*leaves, scale=1.0, softcap=50.0, return_stats=True, impl=impl)
    assert rows.max.max() <= 50.0
    plain = torch.softmax(50.0 * torch.tanh(leaves[0] @ leaves[1].mT / 50.0), -1) @ leaves[2]
    ours, theirs = (torch.autograd.grad(x.sin().sum(), leaves) for x in (output, plain))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@every_implementation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("std", [1, 4, 16, 64, 256])
def test_sixteen_bit_errors_stay_those_of_rounding_the_result(std: int, dtype: torch.dtype, impl: str) -> None:
    query, key, value = (torch.randn(1, 2, 67, 64).to(dtype) for _ in range(3))
    output = attention(query, key, value, scale=std / 8.0, impl=impl)
    truth = exact(query, key, value, scale=std / 8.0)
    eager = torch.softmax(query.float() @ key.float().mT * (std / 8.0), -1) @ value.float()
    budget = 2.0 * (eager.double() - truth).abs().max() + torch.finfo(dtype).eps * truth.abs().max()
    assert (output.double() - truth).abs().max() <= budget


@every_implementation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_half_of_the_most_negative_number_hides(dtype: torch.dtype, impl: str) -> None:
    query, key, value = (torch.randn(1, 1, 3, 5).to(dtype) for _ in range(3))
    lowest = torch.finfo(dtype).min
    for hidden in (-math.inf, lowest, lowest / 2):
        mask = torch.zeros(3, 3, dtype=dtype)
        mask[:, 1] = hidden
        mask[2] = hidden
        output, rows = attention(query, key, value, mask, return_stats=True, impl=impl)
        assert rows.count.tolist() == [[[2, 2, 0]]]
        assert not output[0, 0, 2].any()
    mask[:, 1] = lowest / 4
    assert row_stats(query, key, mask, impl=impl).count[0, 0].tolist() == [3, 3, 1]


@every_implementation
@pytest.mark.parametrize("hidden", [-1e300, -1e39, float(torch.finfo(torch.float32).min)])
def test_a_float64_mask_hides_what_float32_would_make_infinite(hidden: float, impl: str) -> None:
    query, key = (torch.randn(1, 1, 3, 5) for _ in range(2))
    mask = torch.zeros(3, 3, dtype=torch.float64)
    mask[:, 1] = hidden
    rows = row_stats(query, key, mask, impl=impl)
    assert rows.count.tolist() == [[[2, 2, 2]]]
    assert torch.isfinite(rows.var).all()
    mask[:, 1] = -1e37
    assert row_stats(query, key, mask, impl=impl).count.tolist() == [[[3, 3, 3]]]


@every_implementation
def test_the_maximum_is_the_true_one_when_logits_rise_tile_after_tile(impl: str) -> None:
    keys = 2053
    query = torch.ones(1, 1, 131, 1)  # so many that tiles are narrow
    key = torch.linspace(-5.0, 5.0, keys).reshape(1, 1, keys, 1)
    rows = row_stats(query, key, scale=1.0, impl=impl)
    assert (rows.max == key.max()).all()
    assert (rows.argmax == keys - 1).all()
    assert (row_stats(query, key.flip(-2), scale=1.0, impl=impl).argmax == 0).all()
    assert (row_stats(query, torch.zeros_like(key), impl=impl).argmax == 0).all(), "a tie goes to the lowest index"


@every_implementation
def test_one_query_over_a_long_cache(impl: str) -> None:
    leaves = [torch.randn(1, 1, tokens, 19, requires_grad=True) for tokens in (1, 70001, 70001)]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    output, rows = attention(*leaves, return_stats=True, impl=impl)
    true_output, true_rows = attention(*exact, return_stats=True, impl="reference")
    assert torch.equal(rows.argmax, true_rows.argmax)
    assert rows.count.item() == 70001
    for name in ("max", "min", "var", "lse", "entropy", "p2", "p3"):
        torch.testing.assert_close(getattr(rows, name), getattr(true_rows, name).float(), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(output, true_output.float())
    found = torch.autograd.grad(output.sum() + rows.entropy.sum(), leaves)
    expected = torch.autograd.grad(true_output.sum() + true_rows.entropy.sum(), exact)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-4, atol=1e-5)


@every_implementation
def test_leading_and_trailing_tiles_may_be_hidden(impl: str) -> None:
    keys = 1543
    query, key, value = torch.randn(1, 2, 67, 16), torch.randn(1, 2, keys, 16), torch.randn(1, 2, keys, 16)
    mask = torch.zeros(keys, dtype=torch.bool)
    mask[700:720] = True
    output, rows = attention(query, key, value, mask, return_stats=True, impl=impl)
    torch.testing.assert_close(output, attention(query, key[:, :, 700:720], value[:, :, 700:720], impl=impl))
    assert (rows.count == 20).all()


@every_implementation
def test_logits_below_any_sentinel_still_count(impl: str) -> None:
    query = torch.full((1, 1, 1, 1), -1.0)
    key = torch.tensor([1e5, 1e5 + 1.0, 3e30]).reshape(1, 1, 3, 1)
    value = torch.tensor([1.0, 3.0, 5.0]).reshape(1, 1, 3, 1)
    output, rows = attention(query, key, value, scale=1.0, return_stats=True, impl=impl)
    p = torch.softmax(torch.tensor([0.0, -1.0]), -1)
    torch.testing.assert_close(output.flatten(), (p @ torch.tensor([1.0, 3.0])).reshape(1))
    assert rows.count.item() == 3
    assert rows.min.item() == -torch.tensor(3e30).item()


@every_implementation
def test_a_value_without_weight_has_no_say_however_large(impl: str) -> None:
    for queries in (2, 9):
        query, key, value = torch.ones(1, 1, queries, 4), torch.zeros(1, 1, 10, 4), torch.ones(1, 1, 10, 4)
        key[:, :, 3], value[:, :, 3] = -1000.0, 1e37
        query.requires_grad_()
        output = attention(query, key, value, scale=1.0, impl=impl)
        torch.testing.assert_close(output, torch.ones_like(output))
        (gradient,) = torch.autograd.grad(output.sum(), query)
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_many_tiles_lose_no_more_than_a_few() -> None:
    keys = 100_003
    query, key = torch.ones(1, 1, 5, 1), torch.full((1, 1, keys, 1), -0.7)
    key[:, :, 0] = 0.0
    value = torch.rand(1, 1, keys, 1, generator=torch.Generator().manual_seed(1))
    output, rows = attention(query, key, value, scale=1.0, return_stats=True, impl="cpu")
    exact, truth = attention(query.double(), key.double(), value.double(), scale=1.0, return_stats=True, impl="reference")
    torch.testing.assert_close(output.double(), exact, rtol=3e-7, atol=0.0)
    for name in ("lse", "entropy", "mean", "var", "p2", "p3"):
        found, expected = getattr(rows, name).double(), getattr(truth, name)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0, msg=name)


@every_implementation
def test_the_gradient_of_a_number_that_serves_many_does_not_stop_growing(impl: str) -> None:
    queries, keys = (64, 2048) if impl == "cpu" else (64, 64)
    query, key = torch.zeros(16, 4, queries, 8), torch.zeros(16, 4, keys, 8)
    mask = torch.zeros(1, 4, 1, 1, requires_grad=True)
    rows = attention(query, key, key, mask, sinks=torch.zeros(4), return_stats=True, impl=impl)[1]
    rows.lse.sum().backward()
    assert mask.grad is not None
    torch.testing.assert_close(mask.grad, torch.full_like(mask.grad, 16 * queries * keys / (keys + 1)), rtol=1e-6, atol=0.0)
