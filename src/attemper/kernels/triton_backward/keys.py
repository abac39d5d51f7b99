"""The gradients of the keys and values, summed over the query heads that share them."""

import triton
import triton.language as tl

from attemper.kernels.triton_backward.tiles import (
    bias_and_seen,
    broken,
    cleaned,
    load_terms,
    logit_gradients,
    weights_again,
)
from attemper.kernels.triton_common import FLOAT_MASK, NO_MASK, end_of_keys, first_key, kept, load_rows, offsets_of, product, store_rows
from attemper.kernels.triton_problem import UNSPECIALIZED


@triton.jit(do_not_specialize=UNSPECIALIZED)
def key_gradients(
    query, key, value, mask, scale, figures, entropy, constant, d_output, d_entropy, d_key, d_value,
    query_batch, query_head, query_row, query_column, key_batch, key_head, key_row, key_column,
    value_batch, value_head, value_row, value_column, mask_batch, mask_head, mask_row, mask_column,
    scale_batch, scale_head, scale_row, flow_batch, flow_head, flow_row, flow_column, figure_stride,
    queries, keys, heads, groups, row_step, low, high, softcap, inverse_softcap, mask_limit,
    seed_low, seed_high, threshold, keep_factor,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, MASK: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, LIFT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program walks from one block of keys of one key head over the queries in reach, of one head of its group after another.

    d_key: [batch, kv_heads, keys, WIDTH] or None; d_value: [batch, kv_heads, keys, VALUE_WIDTH] or None. LIFT: a power of two by
    which weights are multiplied while they are in the dtype of the values, which may hold no number as small as they are.
    """
    blocks = tl.cdiv(keys, BLOCK_N)
    start = tl.program_id(0) % blocks * BLOCK_N
    plane = (tl.program_id(0) // blocks).to(tl.int64)
    kv_heads = heads // groups
    batch, kv_head = (plane // kv_heads).to(tl.int32), (plane % kv_heads).to(tl.int32)
    columns = start + tl.arange(0, BLOCK_N)
    here = columns < keys
    last = tl.minimum(start + BLOCK_N, keys) - 1

    # [keys, BLOCK_D], [keys, BLOCK_V]
    k = load_rows(key, offsets_of(batch, kv_head, columns, key_batch, key_head, key_row), key_column, here, WIDTH, BLOCK_D)
    v = k
    if d_output is not None:
        value_offsets = offsets_of(batch, kv_head, columns, value_batch, value_head, value_row)
        v = load_rows(value, value_offsets, value_column, here, VALUE_WIDTH, BLOCK_V)
    key_gradient = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    value_gradient = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)

    # Rows in reach of any of the keys, and those in reach of all of them, half-open.
    begin, stop, whole, rest = 0, queries, 0, queries
    if RIGHT:
        begin = tl.cdiv(tl.maximum(start - high, 0), row_step) // BLOCK_M * BLOCK_M
        whole = tl.cdiv(tl.maximum(last - high, 0), row_step)
    if LEFT:
        stop = tl.minimum(queries, tl.where(last < low, 0, (last - low) // row_step + 1))
        rest = tl.minimum(queries, tl.where(start < low, 0, (start - low) // row_step + 1))
    # Tiles of the first rows, whole tiles, tiles of the last rows; under a mask there are no whole ones.
    if MASK == NO_MASK:
        whole = tl.minimum(tl.maximum(tl.cdiv(whole, BLOCK_M) * BLOCK_M, begin), tl.maximum(stop, begin))
        rest = tl.maximum(rest // BLOCK_M * BLOCK_M, whole)
    else:
        whole, rest = begin, begin
    for member in range(0, groups):
        head = kv_head * groups + member
        for part in tl.static_range(3):
            if (part == 0 and RIGHT) or (part == 1 and MASK == NO_MASK) or part == 2:
                from_row = begin if part == 0 else whole if part == 1 else rest
                to_row = whole if part == 0 else rest if part == 1 else stop
                for start_row in range(from_row, to_row, BLOCK_M):
                    key_gradient, value_gradient = _add_tile(
                        key_gradient, value_gradient, k, v, start, columns, start_row, batch, head,
                        query, scale, mask, figures, entropy, constant, d_output, d_entropy,
                        query_batch, query_head, query_row, query_column, mask_batch, mask_head, mask_row, mask_column,
                        scale_batch, scale_head, scale_row, flow_batch, flow_head, flow_row, flow_column, figure_stride,
                        queries, keys, heads, row_step, low, high, softcap, inverse_softcap, mask_limit,
                        seed_low, seed_high, threshold, keep_factor,
                        WIDTH, VALUE_WIDTH, BLOCK_D, BLOCK_V, MASK, LEFT, RIGHT, SOFTCAP, DROPOUT, LIFT, BLOCK_M, BLOCK_N,
                        part == 1, d_key is not None, d_value is not None,
                    )  # fmt: skip

    if d_key is not None:
        store_rows(d_key, (plane * keys + columns) * WIDTH, key_gradient, here, WIDTH, BLOCK_D)
    if d_value is not None:
        store_rows(d_value, (plane * keys + columns) * VALUE_WIDTH, value_gradient * (1.0 / LIFT), here, VALUE_WIDTH, BLOCK_V)


@triton.jit
def _add_tile(
    key_gradient, value_gradient, k, v, start, columns, start_row, batch, head,
    query, scale, mask, figures, entropy, constant, d_output, d_entropy,
    query_batch, query_head, query_row, query_column, mask_batch, mask_head, mask_row, mask_column,
    scale_batch, scale_head, scale_row, flow_batch, flow_head, flow_row, flow_column, figure_stride,
    queries, keys, heads, row_step, low, high, softcap, inverse_softcap, mask_limit, seed_low, seed_high, threshold, keep_factor,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, MASK: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, LIFT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WHOLE: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """What the rows from `start_row` on add to each sum. Tiles are [keys, rows]. WHOLE: every row is there and sees every key."""
    plane = batch.to(tl.int64) * heads + head
    row = start_row + tl.arange(0, BLOCK_M)
    inside = row < queries
    factor, shift, peak, surprise, of_constant, of_entropy = load_terms(
        scale, figures, entropy, constant, d_entropy, batch, head, row, inside, plane, figure_stride, queries,
        scale_batch, scale_head, scale_row,
    )  # fmt: skip
    # [rows, BLOCK_D]
    q = load_rows(query, offsets_of(batch, head, row, query_batch, query_head, query_row), query_column, inside, WIDTH, BLOCK_D)
    products = product(k, tl.trans(q))
    BIASED: tl.constexpr = MASK == FLOAT_MASK and not WHOLE
    bias = 0.0
    if not WHOLE:
        first = first_key(row, row_step, low, LEFT)
        end = tl.where(inside, end_of_keys(row, row_step, high, keys, RIGHT), 0)
        mask_offsets = offsets_of(batch, head, row, mask_batch, mask_head, mask_row)
        bias, seen = bias_and_seen(first, end, columns, mask, mask_offsets, mask_column, mask_limit, LEFT, MASK)
        seen = tl.trans(seen)
        if BIASED:
            bias = tl.trans(bias)
    weights, shifted, slope = weights_again(
        products, factor[None, :], shift[None, :], peak[None, :], softcap, inverse_softcap, bias, SOFTCAP, BIASED
    )
    into = tl.zeros(products.shape, tl.float32)
    if d_output is not None:
        # [rows, BLOCK_V]
        flow_offsets = offsets_of(batch, head, row, flow_batch, flow_head, flow_row)
        flow = load_rows(d_output, flow_offsets, flow_column, inside, VALUE_WIDTH, BLOCK_V)
        into = product(v, tl.trans(flow))
        passed = weights * LIFT
        if DROPOUT:
            keep = tl.trans(kept(batch, head, row, start, seed_low, seed_high, threshold, BLOCK_N))
            into *= tl.where(keep, keep_factor, 0.0)
            passed *= tl.where(keep, keep_factor, 0.0)
        if VALUE:
            if not WHOLE:
                # 0 · NaN is NaN: what is not finite reaches only keys that are seen by its row.
                passed = tl.where(seen, passed + broken(flow)[None, :], 0.0)
                flow = cleaned(flow)
            value_gradient += product(passed.to(flow.dtype), flow)
    if KEY:
        d_logits = logit_gradients(
            weights, shifted, into, of_constant[None, :], of_entropy[None, :], surprise[None, :], d_entropy is not None
        )
        d_products = d_logits * slope * factor[None, :]
        if not WHOLE:
            d_products = tl.where(seen, d_products + broken(q)[None, :], 0.0)
            q = cleaned(q)
        key_gradient += product(d_products.to(q.dtype), q)
    return key_gradient, value_gradient
