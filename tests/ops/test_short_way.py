"""Plain calls go a shorter way than others: to the bit the same results and gradients, and no argument that slips by."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attemper import attention
from attemper.errors import ArgumentError
from attemper.kernels import cpu
from tests.attention_cases import tensors

SHORT_WAY: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = [
    ("a few rows", (1, 1, 16, 64), (1, 1, 16, 64)),
    ("many rows", (2, 3, 131, 17), (2, 3, 257, 17)),
    ("one query", (2, 3, 1, 5), (2, 3, 11, 5)),
    ("no keys", (2, 3, 7, 5), (2, 3, 0, 5)),
    ("no queries", (2, 3, 0, 5), (2, 3, 11, 5)),
    ("three dimensions", (3, 7, 5), (3, 11, 5)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("query_shape", "key_shape"), [case[1:] for case in SHORT_WAY], ids=[case[0] for case in SHORT_WAY])
def test_the_short_way_of_plain_calls_is_the_long_one_to_the_bit(
    query_shape: tuple[int, ...], key_shape: tuple[int, ...], is_causal: bool, dtype: torch.dtype
) -> None:
    query, key, value = (torch.randn(shape, dtype=dtype) for shape in (query_shape, key_shape, (*key_shape[:-1], 13)))
    # Laid out otherwise the second time: what is remembered of the first must not serve.
    for laid_out in ((query, key, value), (query.mT.contiguous().mT, key.mT.contiguous().mT, value)):
        for asked in (False, True):
            taken = cpu.plan(*laid_out, is_causal, asked) is not None
            assert taken == (cpu.available() and query.ndim == 4 and 0 not in (*query_shape, *key_shape))
            outputs = [
                attention(*laid_out, is_causal=is_causal, return_stats=asked, **options)
                for options in ({}, {"scale": 1.0 / math.sqrt(query_shape[-1])})
            ]
            parts = [(one if asked else (one,)) for one in outputs]
            assert torch.equal(parts[0][0], parts[1][0])
            if asked:
                for name in ("lse", "entropy", "rest"):
                    assert torch.equal(getattr(parts[0][1], name), getattr(parts[1][1], name)), name


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1, 2)])
def test_the_short_way_derives_what_the_long_one_does(wanted: tuple[int, ...], asked: bool) -> None:
    shape, scale = (2, 3, 13, 16), 0.25
    with torch.inference_mode():  # a plan made here serves where others differentiate
        attention(*tensors(*shape), is_causal=True, return_stats=asked)
    leaves = [x.requires_grad_(i in wanted) for i, x in enumerate(tensors(*shape))]

    def gradients(**options: Any) -> tuple[Tensor, ...]:
        found = attention(*leaves, is_causal=True, return_stats=asked, **options)
        output, loss = (found[0], found[1].entropy.sum()) if asked else (found, 0.0)
        return torch.autograd.grad(output.square().sum() + loss, [leaves[i] for i in wanted])

    for one, other in zip(gradients(), gradients(scale=scale), strict=True):
        assert torch.equal(one, other)
    with torch.no_grad():
        assert not attention(*leaves).requires_grad


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.complex64], ids=str)
def test_only_floats_are_taken(dtype: torch.dtype) -> None:
    query = torch.zeros(1, 1, 3, 5, dtype=dtype)
    with pytest.raises(ArgumentError, match=f"query: got {dtype}; expected float32"):
        attention(query, query, query)
