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

import attemper
from attemper import RowStats, attention, merge
from attemper.errors import ArgumentError, UnsupportedError
from attemper.kernels import cpu
from attemper.kernels.blocked.tiles import tiles
from attemper.kernels.spec import Rules
from attemper.ops import row_stats
from attemper.ops.arguments import check
from tests.attention_cases import CASES, STATISTICS, build

IMPLEMENTATIONS = ("reference", "blocked", "cpu")
every_implementation = pytest.mark.parametrize("impl", IMPLEMENTATIONS)


def tensors(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (torch.randn(*shape, dtype=dtype) for _ in range(3))
    return query, key, value


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


@pytest.mark.parametrize("row_stride", [0, -1, 2.0, True])
def test_a_stride_that_is_none_is_refused(row_stride: object) -> None:
    query = torch.randn(1, 1, 3, 2)
    with pytest.raises(ArgumentError, match=rf"row_stride: got {row_stride!r}; expected a whole number from 1"):
        row_stats(query, query, row_stride=row_stride)


class TestDropout:
    """Dropout acts on the weights after the statistics, by a generator that counts."""

    @every_implementation
    def test_the_record_is_that_of_the_weights_before_it(self, impl: str) -> None:
        query, key, value = tensors(2, 3, 7, 5)
        dropped = attention(query, key, value, dropout_p=0.5, return_stats=True, impl=impl)
        kept = attention(query, key, value, return_stats=True, impl=impl)
        assert not torch.allclose(dropped[0], kept[0])
        assert torch.equal(dropped[1].rest, kept[1].rest)

    def test_every_implementation_and_tile_drops_the_same(self) -> None:
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

    def test_the_share_that_is_kept(self) -> None:
        p, keys = 0.3, 4001
        zeros, ones = torch.zeros(1, 2, 101, 1), torch.ones(1, 2, keys, 1)
        kept = attention(zeros, torch.zeros_like(ones), ones, dropout_p=p) * (1 - p)
        share, sigma = kept.mean().item(), math.sqrt(p * (1 - p) / (2 * 101 * keys))
        assert abs(share - (1 - p)) < 4 * sigma

    def test_weights_are_dropped_independently_of_their_neighbours(self) -> None:
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

    def test_the_seed_comes_from_torchs_generator(self) -> None:
        query, key, value = tensors(1, 2, 7, 5)
        torch.manual_seed(3)
        first, second = (attention(query, key, value, dropout_p=0.5) for _ in range(2))
        torch.manual_seed(3)
        again = attention(query, key, value, dropout_p=0.5)
        assert torch.equal(first, again)
        assert not torch.equal(first, second)

    def test_the_seed_is_drawn_here_whatever_the_default_device(self) -> None:
        query, key, value = tensors(1, 2, 7, 5)
        torch.manual_seed(3)
        expected = attention(query, key, value, dropout_p=0.5)
        torch.manual_seed(3)
        with torch.device("meta"):
            assert torch.equal(attention(query, key, value, dropout_p=0.5), expected)

    @every_implementation
    def test_all_dropped_is_nought(self, impl: str) -> None:
        query, key, value = (x.requires_grad_() for x in tensors(1, 2, 7, 5))
        output = attention(query, key, value, dropout_p=1.0, impl=impl)
        output.sum().backward()
        assert not output.any()
        assert query.grad is not None
        assert not query.grad.any()


def test_philox_is_philox() -> None:
    # The known answers of Philox4x32-10 that its authors publish with the generator (Random123, kat_vectors).
    from attemper.kernels.dropout import _philox

    def words(counter: int, seed: int) -> list[int]:
        return [x.item() for x in _philox(tuple(torch.tensor(counter) for _ in range(4)), seed)]

    assert words(0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert words(0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


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
        attention(*tensors(*shape), return_stats=asked)
    leaves = [x.requires_grad_(i in wanted) for i, x in enumerate(tensors(*shape))]

    def gradients(**options: Any) -> tuple[Tensor, ...]:
        found = attention(*leaves, return_stats=asked, **options)
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


Q, K, V = torch.zeros(2, 3, 5, 7), torch.zeros(2, 3, 11, 7), torch.zeros(2, 3, 11, 13)
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("query", {"query": [1.0]}, r"query: got list; expected a torch\.Tensor"),
    ("query dimensions", {"query": Q[0, 0]}, r"query: got shape \(5, 7\); expected \[\.\.\., heads, tokens, width\]"),
    ("query dtype", {"query": Q.long()}, r"query: got torch\.int64; expected float32, float64, bfloat16 or float16"),
    ("query complex", {"query": Q.cfloat()}, r"query: got torch\.complex64"),
    ("query sparse", {"query": Q.to_sparse()}, r"query: got layout torch\.sparse_coo; expected a dense tensor"),
    ("key dtype", {"key": K.half()}, r"key: got torch\.float16; expected torch\.float32, the dtype of query"),
    ("key device", {"key": K.to("meta")}, "key: got a tensor on meta; expected one on cpu"),
    ("key dimensions", {"key": K[0]}, r"key: got shape \(3, 11, 7\); expected 4 dimensions"),
    ("key width", {"key": K[..., :5]}, r"key: got width 5 \(shape \(2, 3, 11, 5\)\); expected width 7"),
    ("value keys", {"value": V[:, :, :4]}, r"value: got shape \(2, 3, 4, 13\); expected \[\.\.\., 3, 11, width\]"),
    ("value heads", {"value": V[:, :1]}, r"value: got shape \(2, 1, 11, 13\)"),
    ("value missing", {"value": None}, r"value: got NoneType; expected a torch\.Tensor"),
    ("heads", {"key": K[:, :1], "value": V[:, :1]}, "key: got 1 heads; expected 3, as many as query has, or enable_gqa=True"),
    (
        "groups",
        {"key": K[:, :2], "value": V[:, :2], "enable_gqa": True},
        "key: got 2 heads; expected a divisor of query's 3 heads",
    ),
    (
        "batch",
        {"key": K.repeat(4, 1, 1, 1)[:3], "value": V.repeat(4, 1, 1, 1)[:3]},
        r"query \(2,\) and key \(3,\) and value \(3,\)",
    ),
    ("mask kind", {"attn_mask": 1.0}, r"attn_mask: got float; expected a bool or float torch\.Tensor"),
    ("mask dtype", {"attn_mask": torch.ones(5, 11, dtype=torch.int64)}, r"attn_mask: got torch\.int64; expected bool"),
    (
        "mask shape",
        {"attn_mask": torch.ones(5, 10, dtype=torch.bool)},
        r"attn_mask: got shape \(5, 10\); expected one that broadcasts to \[\.\.\., heads, queries, keys\] = \(2, 3, 5, 11\)",
    ),
    ("mask larger", {"attn_mask": torch.ones(1, 2, 3, 5, 11)}, r"attn_mask: got shape \(1, 2, 3, 5, 11\)"),
    ("dropout", {"dropout_p": 1.5}, r"dropout_p: got 1\.5; expected a probability in \[0, 1\]"),
    ("dropout nan", {"dropout_p": math.nan}, "dropout_p: got nan"),
    ("causal", {"is_causal": 1}, "is_causal: got 1; expected True or False"),
    ("scale kind", {"scale": "0.1"}, r"scale: got '0\.1'; expected a finite number, a tensor, or None"),
    ("scale nan", {"scale": math.nan}, "scale: got nan"),
    ("scale bool", {"scale": True}, "scale: got True"),
    (
        "scale heads",
        {"scale": torch.ones(5)},
        r"scale: got a 1-D tensor of shape \(5,\); expected \(3,\): one factor for each head",
    ),
    (
        "scale shape",
        {"scale": torch.ones(3, 4)},
        r"scale: got shape \(3, 4\); expected one that broadcasts to \[\.\.\., heads, queries\]",
    ),
    (
        "scale dtype",
        {"scale": torch.ones((), dtype=torch.int64)},
        r"scale: got a tensor of torch\.int64; expected a floating-point tensor",
    ),
    ("softcap", {"softcap": 0.0}, r"softcap: got 0\.0; expected a finite number above 0"),
    (
        "softcap beyond float32",
        {"softcap": 1e39},
        r"softcap: got 1e\+39; expected a finite number above 0, .*; in torch\.float32",
    ),
    ("softcap below float32", {"softcap": 1e-46}, r"softcap: got 1e-46; .*; in torch\.float32"),
    ("scale beyond float32", {"scale": -1e39}, r"scale: got -1e\+39; expected a finite number, .*; in torch\.float32"),
    ("scale beyond floats", {"scale": 10**400}, "scale: got 10000"),
    ("softcap kind", {"softcap": "50"}, "softcap: got '50'"),
    ("sinks kind", {"sinks": 0.5}, r"sinks: got float; expected a float torch\.Tensor"),
    (
        "sinks shape",
        {"sinks": torch.zeros(4)},
        r"sinks: got torch\.float32 of shape \(4,\); expected a float tensor of shape \(3,\)",
    ),
    (
        "mask sparse",
        {"attn_mask": torch.ones(5, 11).to_sparse()},
        r"attn_mask: got layout torch\.sparse_coo; expected a dense tensor",
    ),
    ("scale sparse", {"scale": torch.ones(3).to_sparse()}, r"scale: got layout torch\.sparse_coo"),
    ("window", {"window": 5}, r"window: got 5; expected \(left, right\)"),
    ("window negative", {"window": (-1, 0)}, r"window: got \(-1, 0\)"),
    ("window float", {"window": (1.0, None)}, r"window: got \(1\.0, None\)"),
    ("offset too far", {"offset": -(2**63)}, r"offset: got -9223372036854775808; expected a whole number, at most 2\^60 in size"),
    ("offset", {"offset": 0.5}, r"offset: got 0\.5; expected a whole number"),
    ("impl", {"impl": "fast"}, "impl: got 'fast'; expected one of 'auto', 'reference', 'blocked', 'cpu', 'triton'"),
]


@pytest.mark.parametrize(("changes", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_a_bad_argument_is_named_with_what_was_given_and_expected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        attention(**{"query": Q, "key": K, "value": V, **changes})


def test_nested_tensors_are_refused() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(3, 5, 7)], layout=torch.jagged)
    with pytest.raises(ArgumentError, match="query: got a nested tensor; expected a dense tensor; pad it"):
        attention(nested, nested, nested)


def test_a_named_implementation_never_falls_back() -> None:
    with pytest.raises(UnsupportedError, match=r"impl: 'triton' is not available .*; available here: 'reference', 'blocked'"):
        attention(Q, K, V, impl="triton")


def test_the_root_lists_what_it_has() -> None:
    with pytest.raises(AttributeError, match="module 'attemper' has no attribute 'atention'"):
        _ = attemper.atention  # pyrefly: ignore
