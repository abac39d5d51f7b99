"""The public function: torch's own meanings, layouts, gradients, dropout, and errors that name the argument."""

import itertools
import math
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attemper import RowStats, attention, merge
from attemper.errors import UnsupportedError
from attemper.kernels.blocked.tiles import tiles
from attemper.kernels.spec import Rules
from attemper.ops import row_stats
from attemper.ops.arguments import check
from tests.attention_cases import CASES, STATISTICS, build, every_implementation, tensors


@every_implementation
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": torch.arange(49).reshape(7, 7) % 5 > 0},
        {"attn_mask": torch.linspace(-2.0, 2.0, 49).reshape(7, 7)},
    ],
    ids=["plain", "causal", "scale", "bool mask", "float mask"],
)
def test_positional_and_named_arguments_mean_what_they_mean_in_torch(arguments: dict[str, Any], impl: str) -> None:
    query, key, value = tensors(2, 3, 7, 5)
    torch.testing.assert_close(
        attention(query, key, value, **arguments, impl=impl), F.scaled_dot_product_attention(query, key, value, **arguments)
    )


@every_implementation
def test_a_mask_and_causal_together_mean_both(impl: str) -> None:
    query, key, value = tensors(2, 3, 7, 5)
    mask = torch.rand(7, 7) > 0.2
    mask.fill_diagonal_(True)
    both = F.scaled_dot_product_attention(query, key, value, mask & torch.ones(7, 7).tril().bool())
    torch.testing.assert_close(attention(query, key, value, mask, 0.0, True, impl=impl), both)


@every_implementation
def test_grouped_heads_read_as_in_torch(impl: str) -> None:
    query, key, value = torch.randn(2, 6, 7, 5), torch.randn(2, 2, 11, 5), torch.randn(2, 2, 11, 5)
    expected = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    torch.testing.assert_close(attention(query, key, value, enable_gqa=True, impl=impl), expected)


@every_implementation
@pytest.mark.parametrize("leading", [(), (2,), (2, 3), (1, 2, 3)])
def test_leading_dimensions_are_given_back(leading: tuple[int, ...], impl: str) -> None:
    query, key, value = torch.randn(*leading, 5, 7, 11), torch.randn(*leading, 5, 13, 11), torch.randn(*leading, 5, 13, 17)
    output, rows = attention(query, key, value, return_stats=True, impl=impl)
    assert output.shape == (*leading, 5, 7, 17)
    assert rows.lse.shape == rows.count.shape == rows.product_min.shape == (*leading, 5, 7)
    flat = attention(*(x.reshape(-1, *x.shape[-3:]) for x in (query, key, value)), impl=impl)
    torch.testing.assert_close(output.reshape(flat.shape), flat, rtol=0, atol=0)


@every_implementation
def test_leading_dimensions_broadcast(impl: str) -> None:
    query, key, value = torch.randn(2, 3, 5, 7, 11), torch.randn(3, 5, 13, 11)[None], torch.randn(2, 1, 5, 13, 11)
    mask, scale = torch.rand(3, 1, 7, 13) > 0.3, torch.rand(2, 1, 5, 1)
    output = attention(query, key, value, mask, scale=scale, impl=impl)
    for i in range(2):
        for j in range(3):
            one = attention(query[i, j], key[0, j], value[i, 0], mask[j], scale=scale[i, 0], impl=impl)
            torch.testing.assert_close(output[i, j], one)


@given(
    st.permutations(range(4)),
    st.lists(st.sampled_from(["whole", "every second", "expanded"]), min_size=3, max_size=3),
    st.integers(0, 1),
)
def test_layout_in_memory_changes_nothing(order: list[int], kinds: list[str], flip: int) -> None:
    def laid_out(kind: str, shape: tuple[int, ...]) -> Tensor:
        permuted = torch.randn([shape[i] for i in order]).permute([order.index(i) for i in range(4)])
        if kind == "every second":
            return torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]
        return permuted[:, :1].expand(shape) if kind == "expanded" else permuted

    shapes = [(2, 3, 5 + flip, 7), (2, 3, 11, 7), (2, 3, 11, 13)]
    leaves = [laid_out(kind, shape).detach().requires_grad_() for kind, shape in zip(kinds, shapes, strict=True)]
    compact = [leaf.detach().contiguous().requires_grad_() for leaf in leaves]
    outputs = [attention(*x) for x in (leaves, compact)]
    torch.testing.assert_close(*outputs)
    gradients = [torch.autograd.grad(y.sum(), x) for x, y in zip((leaves, compact), outputs, strict=True)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@every_implementation
@pytest.mark.parametrize("case", [case for case in CASES if case.queries <= 41 and case.keys <= 41], ids=lambda case: case.name)
def test_gradcheck_in_float64(case: Any, impl: str) -> None:
    problem = build(case, torch.float64)
    arguments = problem.arguments
    if arguments["attn_mask"] is not None and arguments["attn_mask"].requires_grad:
        # Perturbing −inf says nothing; the finite part of the mask is checked.
        arguments["attn_mask"] = torch.where(arguments["attn_mask"].detach() == -math.inf, 0.0, arguments["attn_mask"].detach())
        arguments["attn_mask"].requires_grad_()
    names, leaves = zip(*problem.leaves().items(), strict=True)

    def run(*values: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(names, values, strict=True))
        positional = [given.pop(name) for name in ("query", "key", "value")]
        output, rows = attention(*positional, **{**arguments, **given}, return_stats=True, impl=impl)
        return output, rows.lse.masked_fill(rows.count == 0, 0.0) if case.is_causal or case.mask else rows.lse, rows.entropy

    if case.keys == 0:
        return  # nothing depends on anything; test_agreement holds the gradients to nought
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


@every_implementation
def test_a_second_derivative_is_refused(impl: str) -> None:
    query, key, value = (x.double().requires_grad_() for x in tensors(1, 2, 3, 5))
    output = attention(query, key, value, impl=impl)
    (gradient,) = torch.autograd.grad(output.sin().sum(), query, create_graph=True)
    with pytest.raises(UnsupportedError, match="a second derivative was asked for"):
        gradient.sum().backward()


@every_implementation
def test_attention_in_parts_has_the_gradients_of_the_whole(impl: str) -> None:
    # As a ring of processes computes it: causal, so that some parts hold no key for some rows; the sink comes last.
    query, key, value = (x.double().requires_grad_() for x in tensors(2, 3, 11, 5))
    sinks = torch.randn(3, dtype=torch.float64, requires_grad=True)
    leaves = (query, key, value, sinks)

    def gradients(output: Tensor, rows: RowStats) -> tuple[Tensor, ...]:
        return torch.autograd.grad(output.sin().sum() + rows.lse.cos().sum() + rows.entropy.square().sum(), leaves)

    whole = attention(query, key, value, is_causal=True, sinks=sinks, return_stats=True, impl=impl)
    parts = []
    for start in (0, 4, 8):
        shard = (key[..., start : start + 4, :], value[..., start : start + 4, :])
        output, rows = attention(query, *shard, is_causal=True, offset=-start, return_stats=True, impl=impl)
        parts.append((output, rows.with_key_offset(start)))
    lone = RowStats.from_sink(sinks, tuple(whole[1].lse.shape))
    merged = merge(merge(merge(parts[2], parts[0]), parts[1]), (torch.zeros_like(whole[0]), lone))
    torch.testing.assert_close(merged[0], whole[0])
    for name in STATISTICS:
        torch.testing.assert_close(getattr(merged[1], name), getattr(whole[1], name))
    for one, other in zip(gradients(*merged), gradients(*whole), strict=True):
        torch.testing.assert_close(one, other)


@every_implementation
@pytest.mark.parametrize("size", [2**53, 2**63 - 1, 2**63, 10**30])
def test_a_window_of_any_size_is_no_limit(size: int, impl: str) -> None:
    query, key, value = tensors(1, 2, 7, 5)
    for offset in (0, 2**60, -(2**60)):
        whole = attention(query, key, value, is_causal=True, offset=offset, impl=impl)
        assert torch.equal(attention(query, key, value, window=(size + 2**62, 0), offset=offset, impl=impl), whole)
    assert torch.equal(attention(query, key, value, window=(size, size), impl=impl), attention(query, key, value, impl=impl))


@every_implementation
def test_only_what_is_asked_for_gets_a_gradient(impl: str) -> None:
    query, key, value = tensors(1, 2, 3, 5)
    value.requires_grad_()
    output, rows = attention(query, key, value, return_stats=True, impl=impl)
    assert output.requires_grad
    assert not rows.max.requires_grad
    output.sum().backward()
    assert query.grad is None
    assert value.grad is not None
    assert not attention(query, key, value.detach(), impl=impl).requires_grad


@every_implementation
@pytest.mark.parametrize("chosen", ["lse", "entropy", "output"])
def test_each_differentiable_part_alone(chosen: str, impl: str) -> None:
    query, key, value = (x.double().requires_grad_() for x in tensors(1, 2, 3, 5))

    def run(*leaves: Tensor) -> Tensor:
        output, rows = attention(*leaves, return_stats=True, impl=impl)
        return output if chosen == "output" else getattr(rows, chosen)

    assert torch.autograd.gradcheck(run, (query, key, value))


@every_implementation
def test_statistics_do_not_change_the_output(impl: str) -> None:
    query, key, value = tensors(2, 3, 37, 17)
    output, rows = attention(query, key, value, is_causal=True, return_stats=True, impl=impl)
    assert torch.equal(output, attention(query, key, value, is_causal=True, impl=impl))
    alone = row_stats(query, key, is_causal=True, impl=impl)
    for name in ("lse", "entropy", "rest"):
        assert torch.equal(getattr(alone, name), getattr(rows, name)), name


@pytest.mark.parametrize("row_stride", [2, 7, 29, 1000, 2**60])
@every_implementation
def test_strided_rows_stand_where_they_stood(impl: str, row_stride: int) -> None:
    query, key = torch.randn(2, 6, 131, 24), torch.randn(2, 3, 307, 24)  # a width that 2^60 carries out of 64 bits
    arguments = {
        "attn_mask": torch.rand(2, 1, 131, 307) > 0.3,
        "scale": torch.rand(2, 6, 131),
        "sinks": torch.randn(6),
        "window": (160, 3),
        "offset": 150,
    }
    every_row = row_stats(query, key, **arguments, impl=impl)
    rows = row_stats(query, key, **arguments, row_stride=row_stride, impl=impl)
    assert rows.lse.shape == (2, 6, -(-131 // row_stride))
    torch.testing.assert_close(rows.lse, every_row.lse[..., ::row_stride])
    torch.testing.assert_close(rows.rest, every_row.rest[..., ::row_stride])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_computes_in_its_dtype_and_gives_back_gradients_in_ours(dtype: torch.dtype) -> None:
    query, key, value = (x.requires_grad_() for x in tensors(1, 2, 7, 5))
    with torch.autocast("cpu", dtype=dtype):
        output, rows = attention(query, key, value, return_stats=True)
        assert F.scaled_dot_product_attention(query, key, value).dtype == output.dtype == dtype
        output.sum().backward()
    assert rows.max.dtype == torch.float32
    assert query.grad is not None
    assert query.grad.dtype == torch.float32
    torch.testing.assert_close(rows.max, row_stats(query.to(dtype), key.to(dtype)).max)
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(row_stats(query, key).rest, rows.rest), "the statistics are those of the attention computed here"
        assert torch.equal(row_stats(query, key.to(dtype)).rest, rows.rest)


@pytest.mark.parametrize(("queries", "most"), [(1, 4), (16, 49), (1024, 391)])
def test_few_queries_over_many_keys_take_few_tiles(queries: int, most: int) -> None:
    inputs = check(torch.zeros(1, 1, queries, 1), torch.zeros(1, 1, 100000, 1), None).inputs
    found = list(tiles(inputs, Rules(), 0, queries))
    assert len(found) == most
    assert found[0].key_start == 0
    assert found[-1].key_end == 100000
    assert all(one.key_end == other.key_start for one, other in itertools.pairwise(found))


def test_threads_do_not_disturb_one_another() -> None:
    query, key, value = tensors(2, 3, 301, 17)
    expected = attention(query, key, value, is_causal=True)
    found: list[Tensor] = []
    workers = [threading.Thread(target=lambda: found.append(attention(query, key, value, is_causal=True))) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 8
    assert all(torch.equal(output, expected) for output in found)


def test_the_reference_keeps_its_result_under_meddling_with_gradients() -> None:
    query, key, value = (x.requires_grad_() for x in tensors(1, 2, 3, 5))
    with torch.no_grad():
        assert not attention(query, key, value).requires_grad
    with torch.inference_mode():
        output = attention(query, key, value)
    torch.testing.assert_close(output.clone(), attention(query, key, value).detach())
