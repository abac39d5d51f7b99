"""The Triton kernels under Triton's interpreter, which test_triton.py starts in a process of its own.

bfloat16 is left out: the interpreter multiplies it as whole numbers.
"""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attemper import attention
from attemper.errors import UnsupportedError
from attemper.kernels import triton_forward
from attemper.kernels.spec import Inputs, Rules
from attemper.kernels.triton_forward import launching
from attemper.ops import row_stats
from tests.attention_agreement import Results, attemper_gives, compare
from tests.attention_cases import CASES, INTERPRETED, STATISTICS, Budget, Case, Problem, build

assert INTERPRETED, "run this by tests/kernels/test_triton.py"

# The interpreter takes a hundredth of a second for a tile: no more of them than show what a case is about.
SMALLER: dict[str, dict[str, Any]] = {
    "one query": {"keys": 331},
    "one query, grouped, window": {"keys": 401, "offset": 387, "window": (189, None)},
    "few queries, masked by head": {"keys": 203},
    "few queries, everything": {"keys": 211, "offset": 190, "window": (100, 4)},
    "tile and one more": {"queries": 65, "keys": 65},
    "tile less one": {"keys": 127},
    "grouped, masked": {"batch": 2, "keys": 67},
    "causal, aligned right": {"keys": 257, "offset": 252},
    "window, causal, far away": {"keys": 301, "offset": 200, "window": (11, 50)},
    "column mask": {"keys": 71},
    "key mask": {"keys": 101},
    "everything": {"batch": 2, "heads": 4, "queries": 19, "keys": 141, "offset": 120, "window": (100, 4)},
    "common offset": {"queries": 17, "keys": 151},
}
DRAWS = 3


def smaller(case: Case) -> Case:
    return dataclasses.replace(case, **{"batch": min(case.batch, 1), **SMALLER.get(case.name, {})})


@pytest.fixture(autouse=True)
def _short_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are dealt to several programs where there are more than a few."""
    monkeypatch.setattr(launching, "_LEAST_KEYS_OF_SPLIT", 96)


def without_gradients(problem: Problem) -> Results:
    with torch.no_grad():
        output, rows = attention(problem.query, problem.key, problem.value, **problem.arguments, return_stats=True, impl="triton")
    return output, {name: getattr(rows, name) for name in STATISTICS}, {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", [smaller(case) for case in CASES], ids=lambda case: case.name)
def test_agrees_with_the_definition(case: Case, dtype: torch.dtype) -> None:
    budget = Budget()
    for seed in list(case.seeds())[:DRAWS]:
        problem = build(case, dtype, seed)
        # Gradients in float16 are the matter of interpreted_backward.py.
        results = attemper_gives(problem, "triton") if dtype == torch.float32 else without_gradients(problem)
        compare(problem, results, budget)
    budget.check()


def draw(*shape: int, keys: int, width: int | None = None, kv_heads: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Query [batch, heads, queries, width] = shape, and the keys and values for it."""
    batch, heads, _, own = shape
    kv = (batch, kv_heads or heads, keys)
    return torch.randn(*shape), torch.randn(*kv, own), torch.randn(*kv, width or own)


def both(*tensors: Tensor, **arguments: Any) -> tuple[Any, Any]:
    """What Triton gives, and what is written in PyTorch."""
    ours, theirs = ((torch.manual_seed(7), attention(*tensors, impl=impl, **arguments))[1] for impl in ("triton", "blocked"))
    return ours, theirs


@pytest.mark.parametrize("width", [16, 80, 96, 192, 256])
def test_widths_of_heads(width: int) -> None:
    ours, theirs = both(*draw(1, 1, 5, width, keys=37), is_causal=True, offset=20)
    torch.testing.assert_close(ours, theirs)


def test_a_wider_head_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="impl: 'triton' does not take a width of 257, above 256; 'blocked' does"):
        attention(*draw(1, 1, 5, 257, keys=5), impl="triton")


@pytest.mark.parametrize("queries", [1, 19])
def test_dropout_drops_what_every_kernel_drops(queries: int) -> None:
    for options in ({"dropout_p": 0.4}, {"dropout_p": 0.4, "is_causal": True, "offset": 50}, {"dropout_p": 1.0}):
        ours, theirs = both(*draw(2, 4, queries, 5, keys=69, kv_heads=2), enable_gqa=True, **options)
        torch.testing.assert_close(ours, theirs)
        assert ours.any() == (options["dropout_p"] < 1.0)


def test_the_record_does_not_know_of_dropout() -> None:
    query, key, value = draw(1, 2, 7, 5, keys=43)
    rows, plain = (attention(query, key, value, dropout_p=p, return_stats=True, impl="triton")[1] for p in (0.5, 0.0))
    assert torch.equal(rows.rest, plain.rest)


def test_without_statistics_the_output_is_the_same() -> None:
    for queries in (2, 33):
        tensors = draw(1, 2, queries, 5, keys=203)
        output = attention(*tensors, is_causal=True, offset=190, impl="triton")
        torch.testing.assert_close(output, both(*tensors, is_causal=True, offset=190)[1])


@pytest.mark.parametrize("stride", [1, 3])
def test_statistics_alone_of_every_so_many_rows(stride: int) -> None:
    query, key, _ = draw(1, 2, 41, 5, keys=47)
    mask = torch.rand(41, 47) > 0.2
    arguments = {"is_causal": True, "window": (19, None), "row_stride": stride}
    ours, theirs = (row_stats(query, key, mask, impl=impl, **arguments) for impl in ("triton", "blocked"))
    assert ours.lse.shape == (1, 2, -(-41 // stride))
    for name in STATISTICS:
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), msg=name)


def test_tensors_are_read_where_they_lie() -> None:
    tokens_first = [torch.randn(2, n, 3, 6).transpose(1, 2) for n in (9, 21, 21)]
    torch.testing.assert_close(*both(*tokens_first))
    width_first = [torch.randn(2, 3, 6, n).mT for n in (9, 21, 21)]
    torch.testing.assert_close(*both(*width_first))
    query, key, value = draw(2, 3, 9, 6, keys=21, kv_heads=1)
    torch.testing.assert_close(*both(query, key.expand(2, 3, 21, 6), value.expand(2, 3, 21, 6)))


def test_keys_that_are_dealt_out_give_what_one_program_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = draw(1, 2, 3, 5, keys=421)
    tensors[1][:, :, 200] = math.nan
    mask = torch.arange(421) != 200
    arguments = {"attn_mask": mask, "sinks": torch.tensor([0.5, 9.0]), "return_stats": True, "impl": "triton"}
    output, rows = attention(*tensors, **arguments)
    monkeypatch.setattr(launching, "_MOST_SPLITS", 1)
    whole, whole_rows = attention(*tensors, **arguments)
    torch.testing.assert_close(output, whole)
    for name in STATISTICS:
        torch.testing.assert_close(getattr(rows, name), getattr(whole_rows, name), msg=name)


def test_large_logits_in_half_precision() -> None:
    # bfloat16 would hold 133120 too; its numbers are those of float32 that end in noughts.
    for dtype, size in ((torch.float16, 320.0), (torch.float32, 364.0)):
        query, key = torch.full((1, 1, 3, 16), size, dtype=dtype), torch.full((1, 1, 67, 16), size / 16, dtype=dtype)
        value = torch.randn(1, 1, 67, 8).to(dtype)
        output, rows = attention(query, key, value, scale=1.0, return_stats=True, impl="triton")
        assert (rows.max == size * size).all()
        torch.testing.assert_close(output.float(), value.float().mean(-2, keepdim=True).expand(1, 1, 3, 8), rtol=2e-3, atol=1e-3)
        torch.testing.assert_close(rows.entropy, torch.full_like(rows.entropy, math.log(67)))


def test_what_the_backward_pass_gets_of_a_row() -> None:
    query, key, value = draw(1, 2, 5, 7, keys=39)
    inputs, rules = Inputs(query, key, value, None, torch.full((1, 1, 1), 0.4), None), Rules()
    for statistics in (False, True):
        result = triton_forward.forward(inputs, rules, statistics=statistics, differentiable=True)
        assert result.figures is not None
        shift, log_total, pivot = result.figures
        torch.testing.assert_close(shift + log_total, result.lse)
        products = inputs.query @ inputs.key.mT
        torch.testing.assert_close(shift, (products * inputs.scale.unsqueeze(-1)).amax(-1))
        torch.testing.assert_close(pivot, products.amax(-1))


@pytest.mark.parametrize("keys", [9, 203])
@pytest.mark.parametrize("masked", [False, True], ids=["all seen", "masked"])
def test_the_largest_of_a_row_that_holds_nan_is_the_first_of_them(masked: bool, keys: int) -> None:
    query, key, _ = draw(1, 1, 3, 5, keys=keys)
    key[:, :, [6, 8]] = math.nan
    mask = torch.arange(keys) != 6 if masked else None
    rows = row_stats(query, key, mask, impl="triton")
    assert (rows.argmax == (8 if masked else 6)).all()
