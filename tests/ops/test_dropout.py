"""Dropout acts on the weights after the statistics, by a generator that counts, and so alike in every implementation."""

import math

import torch

from attemper import attention
from attemper.kernels.dropout import _philox
from tests.attention_cases import IMPLEMENTATIONS, every_implementation, tensors


@every_implementation
def test_the_record_is_that_of_the_weights_before_it(impl: str) -> None:
    query, key, value = tensors(2, 3, 7, 5)
    dropped = attention(query, key, value, dropout_p=0.5, return_stats=True, impl=impl)
    kept = attention(query, key, value, return_stats=True, impl=impl)
    assert not torch.allclose(dropped[0], kept[0])
    assert torch.equal(dropped[1].rest, kept[1].rest)


def test_every_implementation_and_tile_drops_the_same() -> None:
    query, key, value = torch.randn(2, 3, 29, 5), torch.randn(2, 3, 1031, 5), torch.randn(2, 3, 1031, 5)
    outputs, gradients = [], []
    for impl in IMPLEMENTATIONS:
        torch.manual_seed(11)
        leaves = [x.double().requires_grad_() for x in (query, key, value)]
        outputs.append(attention(*leaves, dropout_p=0.3, impl=impl))
        gradients.append(torch.autograd.grad(outputs[-1].sin().sum(), leaves))
    for output, gradient in zip(outputs[1:], gradients[1:], strict=True):
        torch.testing.assert_close(output, outputs[0])
        torch.testing.assert_close(gradient, gradients[0])


def test_the_share_that_is_kept() -> None:
    p, keys = 0.3, 4001
    zeros, ones = torch.zeros(1, 2, 101, 1), torch.ones(1, 2, keys, 1)
    kept = attention(zeros, torch.zeros_like(ones), ones, dropout_p=p) * (1 - p)
    share, sigma = kept.mean().item(), math.sqrt(p * (1 - p) / (2 * 101 * keys))
    assert abs(share - (1 - p)) < 4 * sigma


def test_weights_are_dropped_independently_of_their_neighbours() -> None:
    keys = 512
    identity = torch.eye(keys).expand(1, 3, keys, keys)
    zeros = torch.zeros(1, 3, 401, 8)
    weights = attention(zeros, torch.zeros(1, 3, keys, 8), identity, dropout_p=0.5) * keys
    kept = (weights > 0).double() * 2 - 1  # ±1
    sigma = 1 / math.sqrt(3 * 401 * keys)
    for shift in ((0, 1), (0, 2), (0, 4), (1, 0), (2, 0)):
        neighbour = kept.roll(shift, dims=(-2, -1))
        assert abs((kept * neighbour).mean().item()) < 5 * sigma, shift
    assert abs((kept[:, 0] * kept[:, 1]).mean().item()) < 5 * sigma * math.sqrt(3), "heads"


def test_the_seed_comes_from_torchs_generator() -> None:
    query, key, value = tensors(1, 2, 7, 5)
    torch.manual_seed(3)
    first, second = (attention(query, key, value, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(3)
    again = attention(query, key, value, dropout_p=0.5)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_the_seed_is_drawn_here_whatever_the_default_device() -> None:
    query, key, value = tensors(1, 2, 7, 5)
    torch.manual_seed(3)
    expected = attention(query, key, value, dropout_p=0.5)
    torch.manual_seed(3)
    with torch.device("meta"):
        assert torch.equal(attention(query, key, value, dropout_p=0.5), expected)


@every_implementation
def test_all_dropped_is_nought(impl: str) -> None:
    query, key, value = (x.requires_grad_() for x in tensors(1, 2, 7, 5))
    output = attention(query, key, value, dropout_p=1.0, impl=impl)
    output.sum().backward()
    assert not output.any()
    assert query.grad is not None
    assert not query.grad.any()


def test_philox_is_philox() -> None:
    # The known answers of Philox4x32-10 that its authors publish with the generator (Random123, kat_vectors).
    def words(counter: int, seed: int) -> list[int]:
        return [x.item() for x in _philox(tuple(torch.tensor(counter) for _ in range(4)), seed)]

    assert words(0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert words(0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
