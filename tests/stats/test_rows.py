"""The record of a row against Python floats, and its algebra as properties."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from attemper import RowStats, merge
from attemper.errors import ArgumentError
from tests.attention_cases import STATISTICS

logit = st.floats(-60.0, 60.0).map(lambda x: round(x, 3))
row = st.lists(st.one_of(logit, st.none()), max_size=9)  # None: an invisible key


def record(keys: list[float | None], sink: float | None = None) -> RowStats:
    """The record of one row of one head."""
    logits = torch.tensor([math.nan if z is None else z for z in keys], dtype=torch.float64).reshape(1, 1, -1)
    visible = torch.tensor([z is not None for z in keys], dtype=torch.bool).reshape(1, 1, -1)
    sinks = None if sink is None else torch.tensor([sink], dtype=torch.float64)
    return RowStats.from_logits(logits, visible, 3.0 * logits, sinks)


def by_hand(keys: list[float | None], sink: float | None = None) -> dict[str, float]:
    """The same record in Python floats, from the definitions."""
    seen = [z for z in keys if z is not None]
    everything = seen if sink is None else [*seen, sink]
    nothing = {"lse": -math.inf, "entropy": 0.0, "p2": 0.0, "p3": 0.0}
    if everything:
        top = max(everything)
        lse = top + math.log(math.fsum(math.exp(z - top) for z in everything))
        p = [math.exp(z - lse) for z in everything]
        entropy = -math.fsum(x * math.log(x) for x in p if x > 0.0)
        nothing = {"lse": lse, "entropy": entropy, "p2": math.fsum(x**2 for x in p), "p3": math.fsum(x**3 for x in p)}
    mean = math.fsum(seen) / len(seen) if seen else 0.0
    return nothing | {
        "count": len(seen),
        "max": max(seen, default=-math.inf),
        "min": min(seen, default=math.inf),
        "argmax": keys.index(max(seen)) if seen else -1,
        "mean": mean,
        "var": math.fsum((z - mean) ** 2 for z in seen) / len(seen) if seen else 0.0,
        "product_max": max((3.0 * z for z in seen), default=-math.inf),
        "product_min": min((3.0 * z for z in seen), default=math.inf),
    }


def assert_same(a: RowStats, b: RowStats) -> None:
    for name in STATISTICS:
        torch.testing.assert_close(
            getattr(a, name), getattr(b, name), rtol=1e-11, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}"
        )
    assert a.sink == b.sink


@given(row, st.one_of(st.none(), logit))
def test_every_field_is_what_its_definition_says(keys: list[float | None], sink: float | None) -> None:
    found = record(keys, sink)
    for name, value in by_hand(keys, sink).items():
        actual = getattr(found, name).item()
        assert actual == pytest.approx(value, rel=1e-11, abs=1e-12), name


@given(row, row)
def test_merge_of_parts_is_the_record_of_the_union(left: list[float | None], right: list[float | None]) -> None:
    merged = merge(record(left), record(right).with_key_offset(len(left)))
    assert_same(merged, record(left + right))


@given(row, row, row)
def test_merge_is_associative(a: list[float | None], b: list[float | None], c: list[float | None]) -> None:
    x, y, z = record(a), record(b).with_key_offset(len(a)), record(c).with_key_offset(len(a) + len(b))
    assert_same(merge(merge(x, y), z), merge(x, merge(y, z)))


@given(row, row)
def test_merge_is_commutative_to_the_bit(a: list[float | None], b: list[float | None]) -> None:
    x, y = record(a), record(b).with_key_offset(len(a))
    forth, back = merge(x, y), merge(y, x)
    for one, other in zip(pytree.tree_leaves(forth), pytree.tree_leaves(back), strict=True):
        assert torch.equal(one, other)


@given(row)
def test_an_empty_record_changes_nothing_to_the_bit(keys: list[float | None]) -> None:
    found = record(keys)
    empty = RowStats.empty((1, 1), dtype=torch.float64)
    for merged in (merge(found, empty), merge(empty, found)):
        for one, other in zip(pytree.tree_leaves(merged), pytree.tree_leaves(found), strict=True):
            assert torch.equal(one, other)


@given(row, row, logit)
def test_the_sink_is_merged_last(left: list[float | None], right: list[float | None], sink: float) -> None:
    keys = merge(record(left), record(right).with_key_offset(len(left)))
    lone = RowStats.from_sink(torch.tensor([sink], dtype=torch.float64), (1, 1))
    assert_same(merge(keys, lone), record(left + right, sink))


@given(row, row)
def test_outputs_merge_with_their_records(left: list[float | None], right: list[float | None]) -> None:
    def part(keys: list[float | None], values: Tensor) -> tuple[Tensor, RowStats]:
        found = record(keys)
        logits = torch.tensor([-math.inf if z is None else z for z in keys], dtype=torch.float64)
        weights = torch.nan_to_num(torch.exp(logits - found.lse.item())) if found.count.item() else torch.zeros_like(logits)
        return (weights @ values).reshape(1, 1, 2), found

    values = torch.arange(2.0 * (len(left) + len(right)), dtype=torch.float64).reshape(-1, 2)
    output, _ = merge(part(left, values[: len(left)]), part(right, values[len(left) :]))
    whole, _ = part(left + right, values)
    torch.testing.assert_close(output, whole, rtol=1e-10, atol=1e-10)


@given(row, st.permutations(range(9)))
def test_the_order_of_keys_changes_nothing_but_argmax(keys: list[float | None], order: list[int]) -> None:
    shuffled = [keys[i] for i in order if i < len(keys)]
    a, b = record(keys), record(shuffled)
    for name in STATISTICS:
        if name != "argmax":
            torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=1e-12, atol=1e-12)


def test_an_empty_row_has_its_own_record() -> None:
    found = record([None, None])
    expected = {"count": 0, "max": -math.inf, "min": math.inf, "argmax": -1, "mean": 0, "var": 0, "lse": -math.inf, "entropy": 0}
    expected |= {"p2": 0, "p3": 0, "product_max": -math.inf, "product_min": math.inf}
    assert {name: getattr(found, name).item() for name in STATISTICS} == expected
    assert found.peak().item() == 0.0
    assert found.gain().item() == 0.0
    assert found.centred_max().item() == 0.0
    assert found.effective_keys().item() == 0.0
    assert not found.saturated().item()
    assert math.isnan(found.normalized_entropy().item())
    assert found.headroom(torch.float16).item() == math.inf


def test_an_empty_row_with_a_sink_has_all_its_weight_there() -> None:
    found = record([None], sink=1.5)
    assert (found.lse.item(), found.p2.item(), found.p3.item(), found.entropy.item(), found.count.item()) == (
        1.5,
        1.0,
        1.0,
        0.0,
        0,
    )
    assert found.peak().item() == 0.0, "peak is the largest weight of a key"


def test_derived_figures_follow_from_the_weights() -> None:
    z = torch.tensor([0.3, -1.2, 2.0, 0.1], dtype=torch.float64)
    p = torch.softmax(z, -1)
    jacobian = torch.diag(p) - torch.outer(p, p)
    found = record(z.tolist())
    assert found.peak().item() == pytest.approx(p.max().item())
    assert found.gain().item() == pytest.approx(jacobian.trace().item())
    assert found.jacobian_norm().item() == pytest.approx(torch.linalg.matrix_norm(jacobian).item())
    assert found.centred_max().item() == pytest.approx((z.max() - z.mean()).item())
    entropy = -(p * p.log()).sum().item()
    assert found.normalized_entropy().item() == pytest.approx(entropy / math.log(4))
    assert found.effective_keys().item() == pytest.approx(math.exp(entropy))
    assert found.headroom(torch.float16).item() == pytest.approx(65504 / 6.0)
    assert found.headroom_bits(torch.float16).item() == pytest.approx(math.log2(65504 / 6.0))


def test_a_sink_counts_as_one_more_choice_in_normalized_entropy() -> None:
    assert record([0.0, 0.0], sink=0.0).normalized_entropy().item() == pytest.approx(1.0)


def test_saturation_needs_two_keys() -> None:
    assert record([9.0, 0.0]).saturated().item()
    assert not record([4.0, 0.0]).saturated().item()  # peak 0.982
    assert not record([9.0]).saturated().item()


def test_a_common_offset_costs_the_variance_nothing() -> None:
    z = torch.linspace(-1.0, 1.0, 1001, dtype=torch.float64)
    exact = RowStats.from_logits(z.reshape(1, 1, -1)).var.item()
    offset = (z + 300.0).float().reshape(1, 1, -1)
    rounded = RowStats.from_logits(offset.double()).var.item()
    assert rounded == pytest.approx(exact, rel=1e-4), "the offset itself rounds"
    assert RowStats.from_logits(offset).var.item() == pytest.approx(rounded, rel=1e-6)


def test_nan_and_infinity_in_visible_places_propagate() -> None:
    logits = torch.tensor([[[0.0, math.nan, 1.0]], [[0.0, math.inf, 1.0]]])
    found = RowStats.from_logits(logits)
    assert torch.isnan(found.max[0]).all()
    assert torch.isnan(found.lse[0]).all()
    assert (found.max[1] == math.inf).all()
    assert torch.isnan(found.entropy[1]).all()


def test_gradients_flow_through_merged_lse_and_entropy_with_empty_parts() -> None:
    logits = torch.tensor([[[0.5, -0.2, 1.0], [0.0, 0.0, 0.0]]], dtype=torch.float64, requires_grad=True)
    visible = torch.tensor([[[True, False, True], [False, False, False]]])

    def merged(z: Tensor) -> tuple[Tensor, Tensor]:
        left = RowStats.from_logits(z[..., :2], visible[..., :2])
        both = merge(left, RowStats.from_logits(z[..., 2:], visible[..., 2:]).with_key_offset(2))
        return both.lse[:, :1], both.entropy

    assert torch.autograd.gradcheck(merged, logits)
    lse, entropy = merged(logits)
    (gradient,) = torch.autograd.grad(lse.sum() + entropy.sum(), logits)
    assert torch.equal(gradient[0, 1], torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("last", [None, -2000.0], ids=["empty", "underflows"])
def test_a_part_without_weight_does_not_disturb_the_gradients(last: float | None) -> None:
    logits = torch.tensor([[[0.5, -0.2, last or 0.0]]], dtype=torch.float64, requires_grad=True)
    visible = torch.tensor([[[True, True, last is not None]]])
    whole = RowStats.from_logits(logits, visible)
    left = RowStats.from_logits(logits[..., :2], visible[..., :2])
    right = RowStats.from_logits(logits[..., 2:], visible[..., 2:])
    for merged in (merge(left, right), merge(right, left)):
        for name in ("lse", "entropy"):
            found, expected = (torch.autograd.grad(getattr(x, name).sum(), logits, retain_graph=True) for x in (merged, whole))
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64], ids=str)
def test_logits_in_which_a_count_would_round_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ArgumentError, match=f"logits: got {dtype}; expected float32 or float64; convert them"):
        RowStats.from_logits(torch.zeros(1, 1, 301, dtype=dtype))


def test_the_record_is_a_frozen_pytree_that_remembers_its_sink() -> None:
    found = record([0.0, 1.0], sink=0.5)
    leaves, spec = pytree.tree_flatten(found)
    assert len(leaves) == 3
    assert pytree.tree_unflatten(leaves, spec).sink
    with pytest.raises(AttributeError, match="lse"):
        found.lse = found.entropy  # pyrefly: ignore


def test_merge_refuses_what_does_not_fit() -> None:
    one, two = RowStats.empty((2, 3)), RowStats.empty((2, 5))
    with pytest.raises(ArgumentError, match=r"b: got rows of shape \(2, 5\); expected the shape of a's, \(2, 3\)"):
        merge(one, two)
    with pytest.raises(ArgumentError, match="a, b: got RowStats and tuple; expected two RowStats"):
        merge(one, (torch.zeros(2, 3, 7), one))  # pyrefly: ignore
    with pytest.raises(ArgumentError, match=r"b: got an output of shape \(2, 3, 5\)"):
        merge((torch.zeros(2, 3, 7), one), (torch.zeros(2, 3, 5), one))
    for output in (torch.zeros(2, 1, 7), torch.zeros(2, 5, 7), torch.zeros(7)):
        given = str(tuple(output.shape)).replace("(", r"\(").replace(")", r"\)")
        with pytest.raises(ArgumentError, match=rf"a, b: got outputs of shape {given}; expected \(2, 3\) and one more dimension"):
            merge((output, one), (output, one))
    sink = RowStats.from_sink(torch.zeros(2), (2, 3))
    with pytest.raises(ArgumentError, match="b: got a record with a sink, as is a's"):
        merge(sink, sink)
