"""What rounds bfloat16 weights, and multiplies them in pairs where the processor can, must not show: see csrc/pairs.h."""

import math

import pytest
import torch
from torch import Tensor

from attemper import attention
from attemper.kernels import cpu
from tests.attention_cases import Budget, Case, Problem, build, gradients_of, plain

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the kernel is not built here (CI insists on it)")


def draw(queries: int, keys: int, width: int, value_width: int, heads: int = 2) -> list[Tensor]:
    shapes = ((queries, width), (keys, width), (keys, value_width), (queries, value_width))
    return [torch.randn(1, heads, *shape).bfloat16() for shape in shapes]


def everything(query: Tensor, key: Tensor, value: Tensor, flow: Tensor, **options: object) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    output, rows = attention(*leaves, return_stats=True, impl="cpu", **options)  # type: ignore[arg-type]
    gradients = torch.autograd.grad([output, rows.lse], leaves, [flow, torch.ones_like(rows.lse)])
    return [output.detach(), rows.lse.detach(), rows.rest, *gradients]


@pytest.mark.parametrize("keys", [1, 2, 3, 5, 7, 127, 128, 129, 131, 255, 300, 511])
def test_weights_are_rounded_to_the_nearest(keys: int) -> None:
    # Equal keys share the weight, and one query's flow of powers of two shows it in the gradient of the values.
    query, key, value, _ = draw(1, keys, 6, 5)
    flow = torch.tensor([1.0, -2.0, 0.5, 4.0, -0.25]).bfloat16().expand(1, 2, 1, 5)
    gradient = everything(query, key[:, :, :1].expand_as(key), value, flow)[-1]
    assert torch.equal(gradient, torch.tensor(1.0 / keys).bfloat16() * flow.expand_as(gradient))


@pytest.mark.parametrize("steps", [1, 3, 5, 7])
def test_a_weight_between_two_numbers_takes_the_even_one(steps: int) -> None:
    # One key has the weight 1, dropout makes it 1 / (1 − p): here an odd multiple of half a step.
    weight = 1.0 + steps * 2.0**-8
    query, key, value, flow = draw(1, 1, 3, 2, heads=19)
    gradient = everything(query, key, value, torch.ones_like(flow), dropout_p=1.0 - 1.0 / weight)[-1]
    kept = gradient[gradient != 0.0]
    assert len(kept) > 19
    assert torch.equal(kept, torch.tensor(weight).bfloat16().expand_as(kept))


@pytest.mark.parametrize("hidden", [0, 2])
@pytest.mark.parametrize("keys", [7, 128, 385])
def test_equal_values_come_out_as_they_went_in(keys: int, hidden: int) -> None:
    # All weights but one lie just below the middle between two numbers: rounding takes 1/256 off the sum of them.
    query, key = torch.ones(1, 1, 67, 1).bfloat16(), torch.zeros(1, 1, keys, 1).bfloat16()
    key[:, :, 3] = 1.0
    value = torch.linspace(1.0, 2.0, 129)[:-1].bfloat16().expand(1, 1, keys, 128)
    visible = torch.arange(keys) >= hidden
    scale = -math.log(0.5 * (1.0 + 0.98 / 256.0))
    output = attention(query, key, value, visible if hidden else None, scale=scale, impl="cpu")
    assert torch.equal(output, value[:, :, :1].expand_as(output))


@pytest.mark.parametrize("keys", [1, 2, 129])
@pytest.mark.parametrize("width", [1, 2, 7, 64])
def test_any_layout_of_the_same_numbers_gives_the_same_bits(width: int, keys: int) -> None:
    query, key, value, flow = draw(5, keys, width, width)
    expected = everything(query, key, value, flow)

    def strided(tensor: Tensor) -> Tensor:  # neighbours along the width lie apart
        return tensor.mT.contiguous().mT

    def odd_rows(tensor: Tensor) -> Tensor:  # rows begin at odd places, an odd distance apart
        wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] // 2 * 2 + 3), math.nan, dtype=tensor.dtype)
        wide[..., 1 : 1 + tensor.shape[-1]] = tensor
        return wide[..., 1 : 1 + tensor.shape[-1]]

    def even_rows(tensor: Tensor) -> Tensor:  # rows an even distance apart, at odd places
        wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] // 2 * 2 + 4), math.nan, dtype=tensor.dtype)
        wide[..., 1 : 1 + tensor.shape[-1]] = tensor
        return wide[..., 1 : 1 + tensor.shape[-1]]

    for layout in (strided, odd_rows, even_rows):
        found = everything(layout(query), layout(key), layout(value), layout(flow))
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other), layout.__name__


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("queries", [1, 5, 37, 67])
def test_what_is_hidden_does_not_leak(queries: int, poison: float) -> None:
    query, key, value, flow = draw(queries, 131, 7, 9)
    visible = torch.ones(queries, 131, dtype=torch.bool)
    visible[:, 3::17] = False
    if queries > 1:
        visible[-1] = False
    clean = everything(query, key, value, flow, attn_mask=visible)
    key[:, :, 3::17, 6] = value[:, :, 3::34, 0] = value[:, :, 20::34, 8] = poison
    if queries > 1:  # a row without keys
        query[:, :, -1, 2] = flow[:, :, -1, 4] = poison
    for one, other in zip(everything(query, key, value, flow, attn_mask=visible), clean, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-7, atol=2**-8)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_is_visible_to_some_reaches_them_alone(poison: float) -> None:
    query, key, value, flow = draw(70, 70, 6, 5)
    value[0, 0, 40, 3] = poison
    flow[0, 0, 30, 1] = poison
    query[0, 1, 20, 5] = poison
    output, _, _, d_query, d_key, d_value = everything(query, key, value, flow, is_causal=True)
    assert torch.isfinite(output[0, 0, :40]).all()
    assert not torch.isfinite(output[0, 0, 40:, 3]).any()
    assert torch.isfinite(output[0, 0, 40:, :3]).all()
    assert not torch.isfinite(d_value[0, 0, :31, 1]).any()  # what row 30 sees
    assert torch.isfinite(d_value[0, 0, 31:]).all()
    assert torch.isfinite(d_value[0, 0, :31, 2:]).all()
    assert torch.isfinite(d_query[0, 0, :30]).all()
    assert not torch.isfinite(d_key[0, 1, :21, 5]).any()
    assert torch.isfinite(d_key[0, 1, 21:]).all()


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_gradients_in_float_do_not_know_of_rounded_weights(dropout_p: float) -> None:
    # Scale, sinks and mask stay in float32; the table has no dropout, and its masks are of the dtype of the inputs.
    case = Case("", 1, 4, 2, 37, 131, 19, 11, mask="float", scale="head", softcap=3.0, sinks=True)
    names, budget = ("scale", "sinks", "attn_mask"), Budget()
    for seed in range(5, 15):
        exact = build(case, torch.bfloat16, seed)
        exact.arguments["attn_mask"] = exact.arguments["attn_mask"].detach().float().requires_grad_()
        found = _gradients(exact, "cpu", dropout_p)
        peers = {
            dtype: _gradients(exact.to(dtype), "reference" if dropout_p else "plain", dropout_p)
            for dtype in (torch.float64, torch.float32)
        }
        for name in names:
            assert found[name].dtype == torch.float32
            budget.add(name, found[name], peers[torch.float64][name], peers[torch.float32][name])
    budget.check()


def _gradients(problem: Problem, impl: str, dropout_p: float) -> dict[str, Tensor]:
    if impl == "plain":
        output, statistics = plain(problem)
        return gradients_of(problem, output, statistics["lse"], statistics["entropy"])
    torch.manual_seed(7)  # the seed of the dropped weights follows
    output, rows = attention(
        problem.query, problem.key, problem.value, **problem.arguments, dropout_p=dropout_p, return_stats=True, impl=impl
    )
    return gradients_of(problem, output, rows.lse, rows.entropy)
