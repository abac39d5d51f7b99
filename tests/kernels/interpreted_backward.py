"""The backward pass in Triton, under its interpreter: every gradient within the error budget, on shapes that cross ragged tiles.

The interpreter is slow: shapes are the smallest that reach a second tile of rows and of keys, of which the smallest are of 32.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attemper import attention
from tests.attention_agreement import attemper_gives, compare
from tests.attention_cases import Budget, Case, build, flowing

# Of numpy, on which the interpreter stands: what is infinite or no number is part of the computation.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

PLAIN = {"batch": 1, "heads": 1, "kv_heads": 1, "queries": 35, "keys": 37, "width": 19, "value_width": 11}

CASES = (
    Case("causal", **{**PLAIN, "is_causal": True}),
    Case("grouped, aligned right", **{**PLAIN, "heads": 3, "is_causal": True, "offset": 32, "queries": 5}),
    Case("window", **{**PLAIN, "window": (3, 5)}),
    Case("window, one side, rows without keys", **{**PLAIN, "window": (3, None), "offset": 9, "softcap": 1.5}),
    Case("bool mask", **{**PLAIN, "mask": "bool"}),
    Case("key mask", **{**PLAIN, "batch": 2, "queries": 3, "mask": "keys"}),
    Case("sinks", **{**PLAIN, "queries": 5, "sinks": True, "mask": "bool"}),
    Case("scale", **{**PLAIN, "queries": 5, "scale": "scalar", "is_causal": True, "offset": 32}),
    Case("scale of each row", **{**PLAIN, "queries": 5, "scale": "query", "softcap": 0.9}),
    Case("common offset", **{**PLAIN, "queries": 5, "offset_of_logits": 300.0, "scale": "scalar"}),
    Case("everything", 1, 2, 1, 5, 37, 13, 7, 2.0, "float", "query", 3.0, True, True, (33, 4), 30),
    Case("sharp", **{**PLAIN, "queries": 5, "factor": 3.0, "scale": 1.0}),
    Case("one key", **{**PLAIN, "queries": 3, "keys": 1}),
    Case("one key seen", **{**PLAIN, "queries": 7, "keys": 9, "window": (0, 0), "scale": "head", "softcap": 2.0}),
)
NOTHING = (
    Case("no keys, sinks", heads=2, kv_heads=1, queries=3, keys=0, sinks=True, scale="head"),
    Case("no queries", queries=0),
    Case("no batch", batch=0),
    Case("width nought", 1, 1, 1, 3, 5, 0, 2, mask="float", scale="scalar"),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES + NOTHING, ids=lambda case: case.name)
def test_every_gradient_keeps_within_the_error_budget(case: Case, dtype: torch.dtype) -> None:
    budget = Budget()
    for seed in case.seeds():
        problem = build(case, dtype, seed)
        compare(problem, attemper_gives(problem, "triton"), budget)
    budget.check()


@pytest.mark.parametrize(
    ("width", "value_width", "dtype"),
    [
        (80, 16, torch.float16),
        (16, 96, torch.float16),
        (64, 128, torch.float32),
        (192, 256, torch.float16),
        (256, 80, torch.float32),
    ],
    ids=str,
)
def test_every_width_keeps_within_the_error_budget(width: int, value_width: int, dtype: torch.dtype) -> None:
    budget = Budget()
    case = Case("wide", 1, 2, 1, 17, 35, width, value_width, is_causal=True, offset=18)
    for seed in range(5, 7):
        problem = build(case, dtype, seed)
        compare(problem, attemper_gives(problem, "triton"), budget)
    budget.check()


def problem_of(**shapes: Any) -> tuple[list[Tensor], Tensor]:
    """(query, key and value in float32 that require gradients, a gradient that flows into the output)."""
    generator = torch.Generator().manual_seed(11)
    sizes = {"queries": 35, "keys": 37, "heads": 2, "kv_heads": 1, **shapes}
    shape = [
        (sizes["heads"], sizes["queries"], 19),
        (sizes["kv_heads"], sizes["keys"], 19),
        (sizes["kv_heads"], sizes["keys"], 11),
    ]
    leaves = [torch.randn(1, *each, generator=generator).requires_grad_() for each in shape]
    return leaves, torch.randn(1, sizes["heads"], sizes["queries"], 11, generator=generator)


def gradients(impl: str, leaves: list[Tensor], wanted: list[Tensor], flow: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """The gradients of `wanted` when `flow` flows into the output, and something uneven into lse and entropy."""
    torch.manual_seed(3)  # of which the seed of dropout is drawn
    output, rows = attention(*leaves, **options, enable_gqa=True, return_stats=True, impl=impl)
    _, of_lse, of_entropy = flowing(output, rows.lse, rows.entropy)
    return torch.autograd.grad([output, rows.lse, rows.entropy], wanted, [flow.to(output.dtype), of_lse, of_entropy])


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 2, 1, 37), (1, 1, 35, 1), (37,), (35, 37)], ids=str)
def test_a_number_of_a_mask_gathers_from_all_that_it_serves(shape: tuple[int, ...]) -> None:
    leaves, flow = problem_of()
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(2)).requires_grad_()
    (found,) = gradients("triton", leaves, [mask], flow, attn_mask=mask)
    exact = [leaf.detach().double().requires_grad_() for leaf in (*leaves, mask)]
    (expected,) = gradients("reference", exact[:3], [exact[3]], flow, attn_mask=exact[3])
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dropout_p", [0.3, 1.0])
def test_the_backward_pass_drops_what_the_forward_pass_dropped(dropout_p: float) -> None:
    leaves, flow = problem_of()
    found = gradients("triton", leaves, leaves, flow, dropout_p=dropout_p, is_causal=True)
    expected = gradients("blocked", leaves, leaves, flow, dropout_p=dropout_p, is_causal=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_twice_the_same_bits() -> None:
    leaves, flow = problem_of()
    mask, scale, sinks = torch.randn(37).requires_grad_(), torch.rand(2).requires_grad_(), torch.randn(2).requires_grad_()
    options = {"attn_mask": mask, "scale": scale, "sinks": sinks, "dropout_p": 0.2, "is_causal": True}
    wanted = [*leaves, mask, scale, sinks]
    first, second = (gradients("triton", leaves, wanted, flow, **options) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def test_only_what_is_wanted_is_formed_and_is_the_same() -> None:
    leaves, flow = problem_of(queries=5)
    mask, scale, sinks = torch.randn(37).requires_grad_(), torch.rand(2).requires_grad_(), torch.randn(2).requires_grad_()
    options = {"attn_mask": mask, "scale": scale, "sinks": sinks}
    everything = [*leaves, mask, scale, sinks]
    together = gradients("triton", leaves, everything, flow, **options)
    for wanted, expected in zip(everything, together, strict=True):
        for leaf in everything:
            leaf.requires_grad_(leaf is wanted)
        (alone,) = gradients("triton", leaves, [wanted], flow, **options)
        assert torch.equal(alone, expected)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_what_flows_into_one_result_alone(which: int) -> None:
    leaves, flow = problem_of(queries=5)
    found = []
    for impl in ("triton", "blocked"):
        output, rows = attention(*leaves, enable_gqa=True, return_stats=True, impl=impl)
        results = (output, rows.lse, rows.entropy)
        flows = (flow, *flowing(output, rows.lse, rows.entropy)[1:])
        found.append(torch.autograd.grad(results[which], leaves, flows[which], allow_unused=True, materialize_grads=True))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_without_statistics_as_with_them() -> None:
    leaves, flow = problem_of(queries=5)
    without = torch.autograd.grad(attention(*leaves, enable_gqa=True, impl="triton"), leaves, flow)
    output, _ = attention(*leaves, enable_gqa=True, return_stats=True, impl="triton")
    for one, other in zip(without, torch.autograd.grad(output, leaves, flow), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_any_layout_of_what_is_read() -> None:
    leaves, _ = problem_of()
    spread = [leaf.detach().mT.contiguous().mT.requires_grad_() for leaf in leaves]
    flow = torch.tensor([[[0.5, -1.0]]]).mT.unsqueeze(-1).expand(1, 2, 35, 11)  # one number for a head
    found = gradients("triton", spread, spread, flow)
    for one, other in zip(found, gradients("triton", leaves, leaves, flow.contiguous()), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("which", ["query", "key", "value", "flow"])
def test_what_is_not_finite_reaches_only_what_sees_it(which: str, value: float) -> None:
    leaves, flow = problem_of(heads=1, queries=35, keys=37)
    place, sees = 33, torch.arange(35) >= 33
    broken = {"query": leaves[0], "key": leaves[1], "value": leaves[2], "flow": flow}[which].detach()
    broken[:, :, place] = value
    d_query, d_key, d_value = gradients("triton", leaves, leaves, flow, is_causal=True)
    if which in ("key", "value"):
        assert not torch.isfinite(d_query[:, :, sees]).any()
        assert torch.isfinite(d_query[:, :, ~sees]).all()
        assert torch.isfinite(d_key[:, :, 35:]).all()
    else:
        reached = torch.arange(37) <= place
        assert torch.isnan(d_query[:, :, place]).all()
        assert torch.isfinite(d_query[:, :, torch.arange(35) != place]).all()
        for gradient in (d_key, d_value):
            assert not torch.isfinite(gradient[:, :, reached]).any()
            assert torch.isfinite(gradient[:, :, ~reached]).all()


def test_what_a_mask_hides_may_be_anything() -> None:
    leaves, flow = problem_of(heads=1)
    mask = torch.ones(35, 37, dtype=torch.bool)
    mask[:, 5], mask[7] = False, False
    expected = gradients("triton", leaves, leaves, flow, attn_mask=mask)
    with torch.no_grad():
        leaves[0][:, :, 7], leaves[1][:, :, 5], leaves[2][:, :, 5] = math.nan, math.inf, math.nan
    found = gradients("triton", leaves, leaves, flow, attn_mask=mask)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "scale": -0.3}, {"dropout_p": 0.5}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_through_the_only_key_that_is_seen_nothing_flows_into_its_logit(options: dict[str, Any], dtype: torch.dtype) -> None:
    query, key, value = (torch.randn(1, 2, 9, 19, dtype=dtype).requires_grad_() for _ in range(3))
    output = attention(query, key, value, window=(0, 0), impl="triton", **options)
    found = torch.autograd.grad(output, [query, key, value], torch.randn_like(output))
    assert not found[0].any()
    assert not found[1].any()
    assert found[2].any()


def test_of_a_row_that_one_key_holds_the_others_keep_their_gradients() -> None:
    leaves = [torch.tensor(rows).reshape(1, 1, -1, 1).requires_grad_() for rows in ([1.0], [30.0, 0.0, 5.0], [0.5, 2.0, -1.0])]
    (found,) = torch.autograd.grad(attention(*leaves, scale=1.0, impl="triton"), leaves[1:2])
    weights = torch.softmax(torch.tensor([30.0, 0.0, 5.0]).double(), 0)
    expected = (weights * (torch.tensor([0.5, 2.0, -1.0]) - 0.5)).float()  # but for the first, whose weight is 1
    torch.testing.assert_close(found.flatten()[1:], expected[1:], rtol=1e-5, atol=0.0)
    assert found.flatten()[0] == 0.0


def test_a_gradient_that_float16_cannot_hold_shows() -> None:
    # dz·scale is rounded to the dtype of the keys before it meets them: 2e5 becomes infinite, though the gradient would be 200.
    query, key = (
        torch.zeros(1, 1, 1, 1, dtype=torch.float16),
        torch.tensor([1e-3, -1e-3], dtype=torch.float16).reshape(1, 1, 2, 1),
    )
    value = torch.tensor([400.0, -400.0], dtype=torch.float16).reshape(1, 1, 2, 1)
    query.requires_grad_()
    for flow, finite in ((1.0, True), (1000.0, False)):
        output = attention(query, key, value, scale=1.0, impl="triton")
        (found,) = torch.autograd.grad(output, query, torch.full_like(output, flow))
        assert torch.isfinite(found).all() == finite
