"""The formulas of the derivations, each against a computation of another kind, in float64."""

import math

import pytest
import torch

from attemper.ops import attention

D, N = 7, 11


@pytest.fixture(autouse=True)
def _in_float64():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_the_jacobian_its_trace_and_its_norm() -> None:
    z = torch.randn(N) * 2
    p = torch.softmax(z, 0)
    jacobian = torch.autograd.functional.jacobian(lambda x: torch.softmax(x, 0), z)
    torch.testing.assert_close(jacobian, torch.diag(p) - p.outer(p))
    torch.testing.assert_close(jacobian.trace(), 1 - p.square().sum())
    torch.testing.assert_close(jacobian.square().sum(), p.pow(2).sum() - 2 * p.pow(3).sum() + p.pow(2).sum() ** 2)


def test_the_gradients_of_logits_query_and_scale() -> None:
    query, key, value = torch.randn(D, requires_grad=True), torch.randn(N, D), torch.randn(N, D)
    scale = torch.tensor(0.7, requires_grad=True)
    outer = torch.randn(D)
    output = attention(query[None, None], key[None], value[None], scale=scale)[0, 0]
    given = torch.autograd.grad(output, (query, scale), outer)
    p = torch.softmax(scale * (key @ query), 0).detach()
    logits = p * (value @ outer - outer @ (p @ value))
    torch.testing.assert_close(given[0], scale.detach() * (logits @ key))
    torch.testing.assert_close(given[1], (logits * (key @ query.detach())).sum())


def test_a_factor_and_the_length_of_a_matrix_have_one_gradient() -> None:
    x, weight, key, value, outer = torch.randn(5, D), torch.randn(D, D), torch.randn(N, D), torch.randn(N, D), torch.randn(5, D)
    logarithm = torch.zeros((), requires_grad=True)
    weight.requires_grad_()
    loss = ((logarithm.exp() * (x @ weight) @ key.mT).softmax(-1) @ value * outer).sum()
    by_factor, by_weight = torch.autograd.grad(loss, (logarithm, weight))
    step = 1e-6
    change = (weight - step * by_weight).norm().log() - weight.norm().log()  # of ln ‖W‖ in a step of gradient descent
    torch.testing.assert_close(weight.square().sum() * change, -step * by_factor, rtol=1e-3, atol=1e-9)


def test_a_one_hot_row_passes_nothing_on() -> None:
    p, value, outer = torch.nn.functional.one_hot(torch.tensor(3), N).double(), torch.randn(N, D), torch.randn(D)
    assert (p * (value @ outer - outer @ (p @ value))).abs().max() == 0


def test_the_entropy_of_small_logits() -> None:
    sigma = 128**-0.5
    z = torch.randn(200, 512) * sigma
    p = torch.softmax(z, -1)
    entropy = -(p * p.log()).sum(-1).mean()
    assert math.log(512) - entropy.item() == pytest.approx(sigma**2 / 2, rel=0.05)


def test_two_parts_of_a_softmax_make_the_whole() -> None:
    z, value = torch.randn(N) * 5, torch.randn(N, D)
    parts = []
    for part in (slice(0, 4), slice(4, N)):
        m = z[part].max()
        weights = (z[part] - m).exp()
        parts.append((m, weights.sum(), weights @ value[part] / weights.sum()))
    (m1, l1, o1), (m2, l2, o2) = parts
    m = torch.maximum(m1, m2)
    total = l1 * (m1 - m).exp() + l2 * (m2 - m).exp()
    merged = (o1 * l1 * (m1 - m).exp() + o2 * l2 * (m2 - m).exp()) / total
    torch.testing.assert_close(merged, torch.softmax(z, 0) @ value)


def test_what_layernorm_does_to_the_direction() -> None:
    x = torch.randn(D) + 0.5
    normed = torch.nn.functional.layer_norm(x, (D,), eps=0)
    expected = (1 - x.mean() ** 2 / x.square().mean()).sqrt()
    torch.testing.assert_close(torch.cosine_similarity(x, normed, dim=0), expected)


def test_rotations_keep_lengths_and_leave_the_difference_of_angles() -> None:
    def turned(x: torch.Tensor, angle: float) -> torch.Tensor:
        return torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]) @ x

    q, k = torch.randn(2, 2)
    torch.testing.assert_close(turned(q, 0.3).norm(), q.norm())
    torch.testing.assert_close(turned(q, 0.3) @ turned(k, 1.1), q @ turned(k, 1.1 - 0.3))


@pytest.mark.parametrize(("weight", "expected"), [("packed", 1 / 2), ("linear", 1 / 3), ("xavier", 1.0), ("he", 2.0)])
def test_the_variance_that_each_initialisation_has(weight: str, expected: float) -> None:
    width = 211
    made = {
        "packed": lambda: torch.nn.MultiheadAttention(width, 1).in_proj_weight,
        "linear": lambda: torch.nn.Linear(width, width).weight,
        "xavier": lambda: torch.nn.init.xavier_uniform_(torch.empty(width, width)),
        "he": lambda: torch.nn.init.kaiming_normal_(torch.empty(width, width)),
    }[weight]()
    assert width * made.detach().var().item() == pytest.approx(expected, rel=0.03)


def test_qk_clip_brings_the_largest_product_to_the_threshold() -> None:
    x, query, key = torch.randn(N, D), torch.randn(D, D), torch.randn(D, D)
    largest = ((x @ query) @ (x @ key).mT).abs().max()
    root = (0.5 * largest / largest).sqrt()
    torch.testing.assert_close(((x @ (root * query)) @ (x @ (root * key)).mT).abs().max(), 0.5 * largest)
