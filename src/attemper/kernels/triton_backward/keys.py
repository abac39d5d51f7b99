"""The gradients of the keys and values, summed over the query heads that share them."""

import triton
import triton.language as tl

from attemper.kernels.triton_backward.tiles import (
    bias_and_seen,
    cleaned,
    holds_nan,
    load_of_lse,
    load_terms,
    logit_gradients,
    spoilt,
    weights_again,
)
from attemper.kernels.triton_common import (
    FLOAT_MASK,
    NO_MASK,
    end_of_keys,
    first_key,
    kept,
    load_rows,
    offsets_of,
    product,
    store_rows,
)
from attemper.kernels.triton_problem import UNSPECIALIZED


@triton.jit(do_not_specialize=UNSPECIALIZED)
def key_gradients(
    query, key, value, mask, scale, figures, entropy, constant, d_output, d_lse, d_entropy, d_key, d_value,
    query_batch, query_head, query_row, query_column, key_batch, key_head, key_row, key_column,
    value_batch, value_head, value_row, value_column, mask_batch, mask_head, mask_row, mask_column,
    scale_batch, scale_head, scale_row, flow_batch, flow_head, flow_row, flow_column, figure_stride,
    queries, keys, heads, groups, row_step, low, high, softcap, inverse_softcap, mask_limit,
    seed_low, seed_high, threshold, keep_factor,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, MASK: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, LIFT: tl.constexpr,
    CAREFUL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program walks from one block of keys of one key head over the queries in reach, of one head of its group after another.

    d_key: [batch, kv_heads, keys, WIDTH] or None; d_value: [batch, kv_heads, keys, VALUE_WIDTH] or None. LIFT: a power of two by
    which weights are multiplied while they are in the dtype of the values, which may hold no number as small as they are.
    CAREFUL: once more, where one of the two holds NaN.
    """
    HIDES: tl.constexpr = LEFT or RIGHT or MASK != NO_MASK
    blocks = tl.cdiv(keys, BLOCK_N)
    start = tl.program_id(0) % blocks * BLOCK_N
    plane = (tl.program_id(0) // blocks).to(tl.int64)
    kv_heads = heads // groups
    batch, kv_head = (plane // kv_heads).to(tl.int32), (plane % kv_heads).to(tl.int32)
    columns = start + tl.arange(0, BLOCK_N)
    here = columns < keys
    last = tl.minimum(start + BLOCK_N, keys) - 1

    # The keys and values of the block: [keys, BLOCK_D], [keys, BLOCK_V].
    k = load_rows(key, offsets_of(batch, kv_head, columns, key_batch, key_head, key_row), key_column, here, WIDTH, BLOCK_D)
    if d_output is not None:
        value_offsets = offsets_of(batch, kv_head, columns, value_batch, value_head, value_row)
        v = load_rows(value, value_offsets, value_column, here, VALUE_WIDTH, BLOCK_V)

    # Rows in reach of any of these keys, half-open.
    begin, stop = 0, queries
    if RIGHT:
        begin = tl.cdiv(tl.maximum(start - high, 0), row_step) // BLOCK_M * BLOCK_M
    if LEFT:
        stop = tl.minimum(queries, tl.where(last < low, 0, (last - low) // row_step + 1))
    key_places, value_places = (plane * keys + columns) * WIDTH, (plane * keys + columns) * VALUE_WIDTH
    again = here
    if CAREFUL:
        again = here & False
        if d_key is not None:
            again = again | (here & holds_nan(load_rows(d_key, key_places, 1, here, WIDTH, BLOCK_D)))
        if d_value is not None:
            again = again | (here & holds_nan(load_rows(d_value, value_places, 1, here, VALUE_WIDTH, BLOCK_V)))
        stop = tl.where(tl.max(again.to(tl.int32), 0) > 0, stop, begin)
    key_gradient = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    value_gradient = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    # Tiles are [keys, rows], so that the weights are the left factor of both sums as they are.
    for member in range(groups):
        head = kv_head * groups + member
        for start_row in range(begin, stop, BLOCK_M):
            row = start_row + tl.arange(0, BLOCK_M)
            inside = row < queries
            factor, shift, peak, surprise, of_constant, of_entropy = load_terms(
                scale, figures, entropy, constant, d_entropy, batch, head, row, inside, batch.to(tl.int64) * heads + head,
                figure_stride, queries, scale_batch, scale_head, scale_row,
            )  # fmt: skip
            # The queries of the tile: [rows, BLOCK_D].
            query_offsets = offsets_of(batch, head, row, query_batch, query_head, query_row)
            q = load_rows(query, query_offsets, query_column, inside, WIDTH, BLOCK_D)
            products = product(k, tl.trans(q))
            bias = 0.0
            if HIDES:
                first = first_key(row, row_step, low, LEFT)
                end = tl.where(inside, end_of_keys(row, row_step, high, keys, RIGHT), 0)
                mask_offsets = offsets_of(batch, head, row, mask_batch, mask_head, mask_row)
                bias, seen = bias_and_seen(first, end, columns, mask, mask_offsets, mask_column, mask_limit, LEFT, MASK)
                bias, seen = tl.trans(bias), tl.trans(seen)
            weights, shifted, slope = weights_again(
                products,
                factor[None, :],
                shift[None, :],
                peak[None, :],
                softcap,
                inverse_softcap,
                bias,
                SOFTCAP,
                MASK == FLOAT_MASK,
            )
            into = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            if d_output is not None:
                # What flows into them: [rows, BLOCK_V].
                flow_offsets = offsets_of(batch, head, row, flow_batch, flow_head, flow_row)
                flow = load_rows(d_output, flow_offsets, flow_column, inside, VALUE_WIDTH, BLOCK_V)
                into = product(v, tl.trans(flow))
                passed = weights * LIFT
                if DROPOUT:
                    keep = tl.trans(kept(batch, head, row, start, seed_low, seed_high, threshold, BLOCK_N))
                    into *= tl.where(keep, keep_factor, 0.0)
                    passed *= tl.where(keep, keep_factor, 0.0)
                if d_value is not None:
                    if HIDES:
                        passed = tl.where(seen, passed, 0.0)
                    if CAREFUL:
                        # 0 · NaN is NaN: what is not finite reaches only keys that are seen by its row.
                        value_gradient += spoilt(seen, flow)
                        flow = cleaned(flow)
                    value_gradient += product(passed.to(flow.dtype), flow)
            if d_key is not None:
                of_lse = load_of_lse(d_lse, of_constant, (batch.to(tl.int64) * heads + head) * queries + row, inside)
                d_logits = logit_gradients(
                    weights,
                    peak[None, :],
                    shifted,
                    into,
                    of_constant[None, :],
                    of_lse[None, :],
                    of_entropy[None, :],
                    surprise[None, :],
                    d_entropy is not None,
                )
                d_products = d_logits * slope * factor[None, :]
                if HIDES:
                    d_products = tl.where(seen, d_products, 0.0)
                if CAREFUL:
                    key_gradient += spoilt(seen, q)
                    q = cleaned(q)
                key_gradient += product(d_products.to(q.dtype), q)

    if d_key is not None:
        store_rows(d_key, key_places, key_gradient, again, WIDTH, BLOCK_D)
    if d_value is not None:
        store_rows(d_value, value_places, value_gradient * (1.0 / LIFT), again, VALUE_WIDTH, BLOCK_V)
