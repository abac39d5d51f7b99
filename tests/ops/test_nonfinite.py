"""What is not finite: shown where it is visible, by every kernel alike, and huge finite numbers taken for what they are."""

import math

import pytest
import torch
from torch import Tensor

from attemper import attention
from attemper.errors import UnsupportedError
from tests.attention_cases import STATISTICS, every_implementation


def draw(queries: int = 5, keys: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    return tuple(torch.randn(1, 2, n, 3, generator=generator).abs() for n in (queries, keys, keys))


@every_implementation
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_last_key_that_a_row_sees_may_be_broken(value: float, softcap: float | None, impl: str) -> None:
    query, key, content = draw()
    key[:, :, 1] = value
    output, rows = attention(query, key, content, is_causal=True, softcap=softcap, return_stats=True, impl=impl)
    sees = torch.arange(5) >= 1
    assert torch.isfinite(output[..., ~sees, :]).all()
    assert torch.equal(rows.count, (torch.arange(5) + 1).expand(1, 2, 5))
    # An infinite key is a finite logit under a cap, and a largest one without.
    broken = {"product_max"} if math.isinf(value) else {"max", "min", "mean", "var", "lse", "entropy", "p2", "p3", "product_max"}
    for name in set(STATISTICS) - {"count", "argmax"}:
        finite = torch.isfinite(getattr(rows, name))
        assert finite[..., ~sees].all(), name
        assert name not in broken or not finite[..., sees].any(), name
    assert torch.isnan(output[..., sees, :]).all() == (math.isnan(value) or softcap is None)


@every_implementation
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_broken_query_spoils_every_figure_of_its_row(softcap: float | None, impl: str) -> None:
    query, key, content = draw()
    query[0, 1, 2, 0] = math.nan
    output, rows = attention(query, key, content, softcap=softcap, return_stats=True, impl=impl)
    broken = torch.zeros(1, 2, 5, dtype=torch.bool)
    broken[0, 1, 2] = True
    for name in set(STATISTICS) - {"count", "argmax"}:
        assert torch.equal(torch.isnan(getattr(rows, name)), broken), name
    assert torch.equal(torch.isnan(output).all(-1), broken)
    assert torch.equal(torch.isnan(output).any(-1), broken)


@every_implementation
@pytest.mark.parametrize("queries", [3, 5])
@pytest.mark.parametrize("place", [1, 131, 598])
def test_a_row_that_sees_infinity_has_no_mean_wherever_it_stands(place: int, queries: int, impl: str) -> None:
    query, key, content = draw(queries, 601)
    key[:, :, place] = math.inf
    rows = attention(query, key, content, return_stats=True, impl=impl)[1]
    assert torch.equal(rows.max, torch.full_like(rows.max, math.inf))
    assert torch.equal(rows.argmax, torch.full_like(rows.argmax, place))
    assert torch.isnan(rows.mean).all()
    assert torch.isnan(rows.var).all()


@every_implementation
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize(("queries", "keys"), [(1, 67), (67, 67), (9, 131)])
@pytest.mark.parametrize("scale", [math.inf, -math.inf, math.nan])
def test_a_scale_that_is_not_finite_gives_the_logits_of_the_definition(
    scale: float, queries: int, keys: int, softcap: float | None, impl: str
) -> None:
    generator = torch.Generator().manual_seed(13)
    query, key, value = (torch.randn(1, 2, n, 5, generator=generator) for n in (queries, keys, keys))
    scales = torch.tensor([scale, 0.5])  # one head of the two
    causal = queries == keys
    found, truth = (
        attention(query, key, value, is_causal=causal, scale=scales, softcap=softcap, return_stats=True, impl=which)
        for which in (impl, "reference")
    )
    torch.testing.assert_close(found[0], truth[0], equal_nan=True)
    for name in STATISTICS:
        torch.testing.assert_close(getattr(found[1], name), getattr(truth[1], name), equal_nan=True, msg=name)


@every_implementation
@pytest.mark.parametrize("masked", [False, True])
def test_a_visible_product_of_minus_infinity_has_no_weight(masked: bool, impl: str) -> None:
    query, key, content = draw()
    key[:, :, 1] = -math.inf
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[:, 6] = not masked
    query.requires_grad_()
    output, rows = attention(query, key, content, mask if masked else None, return_stats=True, impl=impl)
    rest = mask.clone()
    rest[:, 1] = False
    expected, without = attention(query.detach(), torch.nan_to_num(key), content, rest, return_stats=True, impl="reference")
    torch.testing.assert_close(output.detach(), expected)
    torch.testing.assert_close(rows.entropy.detach(), without.entropy)
    torch.testing.assert_close(rows.lse.detach(), without.lse)
    for each in (rows.min, rows.product_min):
        assert torch.equal(each, torch.full_like(each, -math.inf))
    for each in (rows.mean, rows.var):
        assert not torch.isfinite(each).any()
    (gradient,) = torch.autograd.grad(output.sum(), query)
    assert not torch.isfinite(gradient).any()  # 0 · −∞: whoever sees such a key is told


@every_implementation
def test_a_mask_far_below_every_logit_has_no_weight(impl: str) -> None:
    # Visible, if barely: −1e38 is above half the most negative float32.
    query, key, content = draw()
    mask = torch.full((7,), -1e38)
    mask[2] = 0.0
    query.requires_grad_()
    _, rows = attention(query, key, content, mask, return_stats=True, impl=impl)
    assert rows.entropy.abs().max() < 1e-30
    assert torch.autograd.grad(rows.entropy.sum(), query)[0].abs().max() < 1e-30
    assert torch.equal(rows.count, torch.full_like(rows.count, 7))


@every_implementation
def test_a_sink_of_infinity_is_no_number(impl: str) -> None:
    output, rows = attention(*draw(), sinks=torch.tensor([math.inf, 0.0]), return_stats=True, impl=impl)
    assert torch.isnan(output[:, 0]).all()
    assert torch.isfinite(output[:, 1]).all()
    assert torch.isnan(rows.p2[:, 0]).all()


@every_implementation
def test_the_farthest_window_reaches_as_far_as_it_says(impl: str) -> None:
    far = 2**60
    found = attention(*draw(), window=(far, None), offset=far, impl=impl)
    torch.testing.assert_close(found, attention(*draw(), window=(0, None), impl="reference"))
    found = attention(*draw(), window=(None, far), offset=-far, impl=impl)
    torch.testing.assert_close(found, attention(*draw(), is_causal=True, impl="reference"))


@every_implementation
def test_a_gradient_whose_sign_is_yet_to_be_turned(impl: str) -> None:
    query, key, content = (x.requires_grad_() for x in draw())
    flow = torch.randn(1, 2, 5, 3)
    found = torch.autograd.grad(attention(query, key, content, impl=impl), (query, content), torch._neg_view(flow))
    expected = torch.autograd.grad(attention(query, key, content, impl=impl), (query, content), -flow)
    torch.testing.assert_close(found, expected)


def test_noughts_without_memory_are_left_to_another_kernel() -> None:
    query, key, content = draw()
    nothing = torch._efficientzerotensor(query.shape)
    torch.testing.assert_close(attention(nothing, key, content), attention(torch.zeros_like(query), key, content))
    with pytest.raises(UnsupportedError, match="impl: 'cpu' does not take a tensor of noughts without memory"):
        attention(nothing, key, content, impl="cpu")
