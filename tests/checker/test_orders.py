"""Orders of operations in narrow dtypes do to a call's rows what the same order in plain torch does."""

from typing import Any

import pytest
import torch
from torch import Tensor

from attemper.capture import AttentionCall, Written
from attemper.checker.orders import EAGER, FUSED, SCALE_FIRST, own_order, read_orders, run_orders
from attemper.checker.sampling import ROWS, sample
from attemper.report import OrderFigures

BATCH, HEADS, KV_HEADS, QUERIES, KEYS, WIDTH = 2, 6, 3, 7, 11, 5
Orders = dict[tuple[str, str], OrderFigures]


def call(query: Tensor, key: Tensor, value: Tensor, **fields: Any) -> AttentionCall:
    fields = {"attn_mask": None, "is_causal": False, "scale": query.shape[-1] ** -0.5} | fields
    return AttentionCall("attention", 0, 0, "sdpa", query=query, key=key, value=value, **fields)


def orders(of: AttentionCall) -> Orders:
    rows = of.row_stats()
    return {(each.dtype, each.order): each for each in read_orders(run_orders(of, rows, rows.count > 0))}


def qkv(dtype: torch.dtype = torch.float32, strength: float = 1.0, **sizes: int) -> tuple[Tensor, Tensor, Tensor]:
    sizes = {"queries": QUERIES, "keys": KEYS, "width": WIDTH, "heads": HEADS, "kv": KV_HEADS, "batch": BATCH} | sizes
    generator = torch.Generator().manual_seed(7)
    query = torch.randn(sizes["batch"], sizes["heads"], sizes["queries"], sizes["width"], generator=generator) * strength
    key, value = (torch.randn(sizes["batch"], sizes["kv"], sizes["keys"], sizes["width"], generator=generator) for _ in "kv")
    return query.to(dtype), key.to(dtype), value.to(dtype)


def plain(of: AttentionCall, dtype: torch.dtype, visible: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and output of all rows: products in a dtype (torch's own matmul), scale, cap, bias, softmax in float32."""
    group = HEADS // of.key.shape[1]
    query, key, value = (each.to(dtype) for each in (of.query, of.key, of.value))
    key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))
    scale = of.scale
    if isinstance(scale, Tensor):
        scale = scale[:, None, None] if scale.dim() == 1 else scale[..., None]
    logits = (query @ key.mT * scale).to(dtype)
    if of.softcap is not None:
        logits = (logits / of.softcap).tanh() * of.softcap
    logits = (logits + bias.to(dtype)).masked_fill(~visible, -torch.inf)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    columns = logits.to(wide)
    if of.sinks is not None:
        sinks = of.sinks.to(wide)[None, :, None, None].expand(*logits.shape[:-1], 1)
        columns = torch.cat([columns, sinks], -1)
    weights = columns.softmax(-1).to(dtype)[..., :KEYS]
    return weights, weights @ value


position = torch.arange(KEYS) - torch.arange(QUERIES)[:, None]
FLOAT_MASK = torch.randn(BATCH, 1, QUERIES, KEYS, generator=torch.Generator().manual_seed(2))
FORMS: dict[str, tuple[dict[str, Any], Tensor, Tensor]] = {
    "plain": ({}, torch.ones(1, dtype=torch.bool), torch.zeros(1)),
    "causal": ({"is_causal": True, "offset": 4}, position <= 4, torch.zeros(1)),
    "window": ({"window": (3, 2), "offset": 2}, (position >= -1) & (position <= 4), torch.zeros(1)),
    "bias": ({"attn_mask": FLOAT_MASK.masked_fill(position > 6, -torch.inf)}, position <= 6, FLOAT_MASK),
    "one row": (
        {"attn_mask": torch.arange(KEYS)[None, None, None] < torch.tensor([9, 4])[:, None, None, None]},
        torch.arange(KEYS)[None, None, None] < torch.tensor([9, 4])[:, None, None, None],
        torch.zeros(1),
    ),
    "by head": ({"scale": torch.linspace(0.2, 2.0, HEADS)}, torch.ones(1, dtype=torch.bool), torch.zeros(1)),
    "by row": (
        {"scale": torch.linspace(0.2, 2.0, HEADS * QUERIES).reshape(1, HEADS, QUERIES)},
        torch.ones(1, dtype=torch.bool),
        torch.zeros(1),
    ),
    "cap and sinks": (
        {"softcap": 3.0, "sinks": torch.linspace(-1, 2, HEADS)},
        torch.ones(1, dtype=torch.bool),
        torch.zeros(1),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_eager_is_what_plain_torch_gives(form: str) -> None:
    # Fewer queries than rows are drawn, so every row is: sums and largest values do not depend on their order.
    assert QUERIES < ROWS
    fields, visible, bias = FORMS[form]
    given = call(*qkv(torch.bfloat16, 3.0), **fields)
    found = orders(given)["bfloat16", EAGER]
    weights, output = plain(given, torch.bfloat16, visible, bias)
    # float64 takes the operands as the call has them; only the bias is rounded by the order.
    true_weights, true_output = plain(given, torch.float64, visible, bias)
    moved = (weights.double() - true_weights).abs().sum(-1).amax((0, 2)) / 2
    error = (output.double() - true_output).square().sum((0, 2, 3)) / true_output.square().sum((0, 2, 3))
    assert found.rows == (BATCH * QUERIES,) * HEADS
    assert found.weight_error == pytest.approx(moved.tolist(), rel=1e-3)
    assert found.output_error == pytest.approx(error.sqrt().tolist(), rel=1e-3)
    assert max(found.weight_error) > 0.003


class TestInputsThatBreakOtherKernels:
    def test_a_product_beyond_float16(self) -> None:
        forty = torch.full((1, 2, 7, 64), 40.0, dtype=torch.float16)
        found = orders(call(forty, forty, qkv(torch.float16, batch=1, kv=2, keys=7)[2]))
        assert bool((forty @ forty.mT).isinf().all())
        eager = found["float16", EAGER]
        assert (eager.product_overflows, eager.broken_rows, eager.rows) == ((49, 49), (7, 7), (7, 7))
        for order in (SCALE_FIRST, FUSED):
            assert found["float16", order].broken_rows == (0, 0)
            assert max(found["float16", order].output_error) < 1e-3
        assert found["bfloat16", EAGER].broken_rows == (0, 0)

    def test_logits_beyond_float16_break_every_order_but_fused(self) -> None:
        generator = torch.Generator().manual_seed(5)
        query, key, value = ((torch.rand(2, 8, 128, 64, generator=generator) * -900).half() for _ in "qkv")
        found = orders(call(query, key, value))
        for order in (EAGER, SCALE_FIRST):
            assert found["float16", order].broken_rows == found["float16", order].rows == (16,) * 8
        assert max(found["float16", FUSED].output_error) < 1e-3

    def test_large_bfloat16_numbers(self) -> None:
        large = torch.full((1, 1, 1, 64), 133120.0, dtype=torch.bfloat16)
        found = orders(call(large, large, large))
        assert found["bfloat16", EAGER].output_error == found["bfloat16", FUSED].output_error == (0.0,)
        assert found["float16", FUSED].operand_overflows == (192,)
        assert found["float8_e4m3fn", "float8"].operand_overflows == (192,)
        assert found["float8_e4m3fn", "float8-amax"].operand_overflows == (0,)

    @pytest.mark.parametrize(("spread", "error"), [(1, 0.004), (4, 0.010), (16, 0.017), (64, 0.029), (256, 0.077)])
    def test_bfloat16_logits_round_away(self, spread: int, error: float) -> None:
        # The whole output's error in facts' own run; a few rows, of those with the largest logits more, give up to 3 times it.
        query, key, value = qkv(torch.bfloat16, spread, width=64, queries=256, keys=256, kv=HEADS)
        found = orders(call(query, key, value))
        assert error / 2 < max(found["bfloat16", EAGER].output_error) < error * 3
        assert max(found["bfloat16", FUSED].output_error) < 0.004


def test_rows_without_a_key_and_padding_are_not_drawn() -> None:
    query, key, value = qkv(queries=31, keys=31)
    visible = torch.ones(31, 31, dtype=torch.bool).tril(-1)  # the first row sees nothing
    given = call(query, key, value, attn_mask=visible)
    rows = given.row_stats()
    counted = (rows.count > 0) & (torch.arange(31) < 4)
    assert orders(given)["float16", FUSED].rows == (16,) * HEADS
    drawn = sample(given, rows, counted)
    assert int(drawn.kept.sum()) == BATCH * HEADS * 3
    places = drawn.visible.sum(-1)[drawn.kept]
    assert sorted(places.unique().tolist()) == [1, 2, 3]


def test_the_largest_product_is_drawn_from_whichever_sequence_has_it() -> None:
    query, key, value = qkv(queries=47, batch=5)
    query[3, 1, 29] *= 50.0  # heads 0 and 1 share a key
    query[1, 4, 11] *= 50.0
    elsewhere = torch.zeros(47, KEYS)
    elsewhere[[5, 43]] = 1e4  # the largest logits are those of other rows
    given = call(query, key, value, attn_mask=elsewhere)
    rows = given.row_stats()
    drawn = sample(given, rows, rows.count > 0)
    products = (drawn.query @ drawn.key.unsqueeze(2).mT).abs().amax((0, 3, 4)).flatten()
    whole = rows.product_absmax().amax((0, 2))
    assert products[[1, 4]].tolist() == pytest.approx(whole[[1, 4]].tolist(), rel=1e-5)
    assert orders(given)["float16", EAGER].rows == (2 * ROWS,) * HEADS


def test_rows_that_were_broken_before_say_nothing() -> None:
    query, key, value = qkv()
    query[0, 2, 4] = torch.nan
    found = orders(call(query, key, value))["float16", EAGER]
    assert found.rows == (14, 14, 13, 14, 14, 14)
    assert found.broken_rows == (0,) * HEADS


def test_weights_that_become_zero_are_summed() -> None:
    # 4096 keys, one of which stands out by 8: each of the others has e^-8 of it, below what e4m3 can write.
    query, key = torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 4096, 1)
    key[..., 0, :] = 8.0
    found = orders(call(query, key, torch.ones(1, 1, 4096, 1), scale=1.0))
    lost = 1 - 1 / (1 + 4095 * 2.718281828459045**-8)
    assert found["float8_e4m3fn", "float8"].lost_weight == pytest.approx((lost,), rel=1e-5)
    assert found["float8_e4m3fn", "float8-amax"].lost_weight == (0.0,)  # weights are scaled to its range too
    assert found["float16", FUSED].lost_weight == (0.0,)


@pytest.mark.parametrize(
    ("written", "dtype", "order"),
    [
        (None, "float16", FUSED),
        (Written(torch.float16, scaled_first=False), "float16", EAGER),
        (Written(torch.bfloat16, scaled_first=True), "bfloat16", SCALE_FIRST),
        (Written(torch.float32, scaled_first=False), "bfloat16", FUSED),
        (Written(torch.float32, scaled_first=False), "float32", EAGER),
    ],
)
def test_the_order_of_the_models_own_code(written: Written | None, dtype: str, order: str) -> None:
    assert own_order(written, dtype) == order
