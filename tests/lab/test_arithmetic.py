"""The emulated 16-bit products against torch's own 16-bit tensors, to the bit, and what overflows and vanishes in them."""

import math

import pytest
import torch
from torch import Tensor, nn

from attemper.lab.arithmetic import FIRST, GROWTH, LossScale, attend, computing, product
from attemper.lab.config import Precision

DTYPES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [1, 2, 17])
def test_products_and_their_gradients_are_those_of_real_tensors(dtype: torch.dtype, inner: int) -> None:
    # Whole numbers where the order of the sum could tell: their sums are exact, so that only the rounding is left.
    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape) if inner < 3 else torch.randint(-40, 41, shape).float()

    a, b, gradient = numbers(2, 3, inner), numbers(2, inner, 5), numbers(2, 3, 5) if inner < 3 else torch.ones(2, 3, 5)
    emulated = [a.clone().requires_grad_(), b.clone().requires_grad_()]
    real = [each.detach().to(dtype).requires_grad_() for each in emulated]
    ours, theirs = product(*emulated, dtype), torch.matmul(*real)
    assert torch.equal(ours, theirs.float())
    if inner > 2:  # else five terms are added in the backward pass, in an order that is torch's affair
        ours.backward(gradient)
        theirs.backward(gradient.to(dtype))
        for one, other in zip(emulated, real, strict=True):
            assert torch.equal(one.grad, other.grad.float())


def test_what_passes_the_range_is_infinite_and_what_falls_under_it_vanishes() -> None:
    q = torch.full((1, 64), 40.0, requires_grad=True)
    assert product(q, torch.full((64, 1), 40.0), torch.float16).item() == math.inf  # 102400
    assert product(q, torch.full((64, 1), 40.0), torch.bfloat16).item() == pytest.approx(102400, rel=2**-8)
    assert product(q.detach() * 2000, torch.ones(64, 1), torch.float16).item() == math.inf  # an input of 80000
    small = product(q, torch.ones(64, 1), torch.float16)
    (gradient,) = torch.autograd.grad(small, q, torch.full_like(small, 2.0**-26))
    assert not gradient.any()
    (gradient,) = torch.autograd.grad(product(q, torch.ones(64, 1), torch.float16), q, torch.full_like(small, 2.0**-24))
    assert (gradient == 2.0**-24).all()


def test_a_linear_layer_is_emulated_inside_and_itself_again_outside() -> None:
    layer, x = nn.Linear(5, 3), torch.randn(2, 7, 5)
    outside = layer(x)
    with computing("fp16"):
        inside = layer(x)
    flat = product(x.reshape(-1, 5), layer.weight.T, torch.float16)
    assert torch.equal(inside.reshape(-1, 3), (flat + layer.bias).half().float())
    assert not torch.equal(inside, outside)
    assert torch.equal(layer(x), outside)
    with computing("bf16"):
        assert layer(x).dtype == torch.bfloat16


def peaked(largest: float) -> tuple[Tensor, Tensor, Tensor]:
    """One query whose logits are 0 and `largest`."""
    return torch.tensor([[[[largest]]]]), torch.tensor([[[[0.0], [1.0]]]]), torch.tensor([[[[3.0], [5.0]]]])


@pytest.mark.parametrize(("arithmetic", "last", "first"), [("fp16_naive", 11.0, 11.125), ("bf16_naive", 88.5, 89.0)])
def test_without_the_maximum_subtracted_the_exponential_ends_where_its_type_does(
    arithmetic: str, last: float, first: float
) -> None:
    def run(largest: float, arithmetic: str) -> float:
        return attend(*peaked(largest), 1.0, causal=False, softcap=None, arithmetic=arithmetic).item()  # type: ignore[arg-type]

    assert run(last, arithmetic) == 5.0
    assert math.isnan(run(first, arithmetic))
    assert run(first, "fp16") == run(first, "fp16_safe") == 5.0


def test_the_sum_of_a_16_bit_softmax_ends_where_its_type_does() -> None:
    # 2¹⁷ keys of one logit: each weight is 2⁻¹⁷, and their sum before the division 131072, past float16's 65504.
    q, k, v = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 2**17, 1), torch.ones(1, 1, 2**17, 1)
    found = {each: attend(q, k, v, 1.0, causal=False, softcap=None, arithmetic=each).item() for each in ("fp16", "fp16_safe")}
    assert found == {"fp16": 1.0, "fp16_safe": 0.0}


def test_a_product_that_overflowed_before_the_scale_is_not_saved_by_the_subtracted_maximum() -> None:
    q = k = torch.full((1, 1, 2, 64), 40.0)
    assert attend(q, k, torch.ones(1, 1, 2, 3), 0.125, causal=False, softcap=None, arithmetic="fp16").isnan().all()
    assert attend(q / 2, k / 2, torch.ones(1, 1, 2, 3), 0.125, causal=False, softcap=None, arithmetic="fp16").eq(1).all()


@pytest.mark.parametrize("arithmetic", ["fp16", "fp16_safe", "fp16_naive", "bf16_naive"])
def test_attention_agrees_with_that_of_real_tensors(arithmetic: str) -> None:
    dtype = torch.bfloat16 if arithmetic == "bf16_naive" else torch.float16
    q, k, v = torch.randn(3, 2, 3, 5, 7).to(dtype)
    logits = q.float() @ k.float().mT
    scaled = logits.to(dtype).float() * 0.375 if arithmetic == "fp16" else logits.to(dtype) * 0.375
    scaled = scaled.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf)
    powers = (scaled - scaled.amax(-1, keepdim=True) if arithmetic in ("fp16", "fp16_safe") else scaled).exp()
    weights = powers / powers.sum(-1, keepdim=True)
    expected = (weights.to(dtype).float() @ v.float()).to(dtype).float()
    found = attend(q.float(), k.float(), v.float(), 0.375, causal=True, softcap=None, arithmetic=arithmetic)  # type: ignore[arg-type]
    assert torch.equal(found, expected)


def test_a_dynamic_factor_halves_at_an_overflow_and_doubles_when_there_was_none_for_long() -> None:
    scale = LossScale(Precision(loss_scale="dynamic"))
    gradient = torch.tensor([FIRST])
    assert scale.take_off([gradient])
    assert gradient.item() == 1.0
    assert not scale.take_off([torch.tensor([math.inf])])
    assert scale.factor == FIRST / 2
    assert all(scale.take_off([torch.ones(1)]) for _ in range(GROWTH))
    assert scale.factor == FIRST


def test_a_constant_factor_is_taken_off_and_never_changes() -> None:
    scale, gradient = LossScale(Precision(loss_scale=8.0)), torch.tensor([math.inf, 16.0])
    assert scale.take_off([gradient])
    assert gradient.tolist() == [math.inf, 2.0]
    assert scale.factor == 8.0
