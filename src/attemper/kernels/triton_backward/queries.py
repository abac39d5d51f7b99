"""The gradient of the queries, and the sums of each row from which the gradient of a learned scale follows."""

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
from attemper.kernels.triton_common import FLOAT_MASK, end_of_keys, first_key, kept, load_rows, offsets_of, product, store_rows
from attemper.kernels.triton_problem import UNSPECIALIZED


@triton.jit(do_not_specialize=UNSPECIALIZED)
def query_gradients(
    query, key, value, mask, scale, figures, entropy, constant, d_output, d_lse, d_entropy, d_query, sums,
    query_batch, query_head, query_row, query_column, key_batch, key_head, key_row, key_column,
    value_batch, value_head, value_row, value_column, mask_batch, mask_head, mask_row, mask_column,
    scale_batch, scale_head, scale_row, flow_batch, flow_head, flow_row, flow_column, figure_stride,
    queries, keys, heads, groups, row_step, low, high, softcap, inverse_softcap, mask_limit,
    seed_low, seed_high, threshold, keep_factor,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, MASK: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, SUMS: tl.constexpr,
    CAREFUL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program walks from one block of queries of one head over the keys in reach.

    d_query: [batch, heads, queries, WIDTH] or None; sums: [SUMS, batch, heads, queries], Σ dz·(u − pivot), back through the cap,
    and where SUMS is 3 Σ p·dp and Σ p·(u − pivot), the latter back through the cap. CAREFUL: once more, where d_query holds NaN.
    """
    blocks = tl.cdiv(queries, BLOCK_M)
    # The last blocks of queries see the most keys under a causal rule: they begin first.
    start_row = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M
    plane = (tl.program_id(0) // blocks).to(tl.int64)
    batch, head = (plane // heads).to(tl.int32), (plane % heads).to(tl.int32)
    row = start_row + tl.arange(0, BLOCK_M)
    inside = row < queries
    last_row = tl.minimum(start_row + BLOCK_M, queries) - 1

    # The queries of the block, and what flows in: [rows, BLOCK_D], [rows, BLOCK_V].
    q = load_rows(query, offsets_of(batch, head, row, query_batch, query_head, query_row), query_column, inside, WIDTH, BLOCK_D)
    if d_output is not None:
        flow_offsets = offsets_of(batch, head, row, flow_batch, flow_head, flow_row)
        flow = load_rows(d_output, flow_offsets, flow_column, inside, VALUE_WIDTH, BLOCK_V)
    factor, shift, peak, surprise, of_constant, of_entropy = load_terms(
        scale, figures, entropy, constant, d_entropy, batch, head, row, inside, plane, figure_stride, queries,
        scale_batch, scale_head, scale_row,
    )  # fmt: skip
    if SUMS > 0:
        pivot = tl.load(figures + 2 * figure_stride + plane * queries + row, mask=inside, other=0.0)
    first = first_key(row, row_step, low, LEFT)
    end = tl.where(inside, end_of_keys(row, row_step, high, keys, RIGHT), 0)
    mask_offsets = offsets_of(batch, head, row, mask_batch, mask_head, mask_row)
    key += offsets_of(batch, head // groups, start_row * 0, key_batch, key_head, key_row)
    if d_output is not None:
        value += offsets_of(batch, head // groups, start_row * 0, value_batch, value_head, value_row)

    begin = first_key(start_row, row_step, low, LEFT) // BLOCK_N * BLOCK_N
    stop = end_of_keys(last_row, row_step, high, keys, RIGHT)
    places = (plane * queries + row) * WIDTH
    again = inside
    if CAREFUL:
        again = inside & holds_nan(load_rows(d_query, places, 1, inside, WIDTH, BLOCK_D))
        stop = tl.where(tl.max(again.to(tl.int32), 0) > 0, stop, begin)
    gradient = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    from_pivot = tl.zeros([BLOCK_M], tl.float32)
    flowing = tl.zeros([BLOCK_M], tl.float32)
    swinging = tl.zeros([BLOCK_M], tl.float32)
    for start in range(begin, stop, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        # The keys of the tile: [keys, BLOCK_D].
        k = load_rows(key, columns.to(tl.int64) * key_row, key_column, columns < keys, WIDTH, BLOCK_D)
        products = product(q, tl.trans(k))
        bias, seen = bias_and_seen(first, end, columns, mask, mask_offsets, mask_column, mask_limit, LEFT, MASK)
        weights, shifted, slope = weights_again(
            products, factor[:, None], shift[:, None], peak[:, None], softcap, inverse_softcap, bias, SOFTCAP, MASK == FLOAT_MASK
        )
        into = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if d_output is not None:
            # Their values: [keys, BLOCK_V].
            v = load_rows(value, columns.to(tl.int64) * value_row, value_column, columns < keys, VALUE_WIDTH, BLOCK_V)
            into = product(flow, tl.trans(v))
            if DROPOUT:
                into *= tl.where(kept(batch, head, row, start, seed_low, seed_high, threshold, BLOCK_N), keep_factor, 0.0)
        if SUMS == 3:
            flowing += tl.sum(tl.where(seen, weights * into, 0.0), 1)
            swinging += tl.sum(tl.where(seen, weights * slope * (products - pivot[:, None]), 0.0), 1)
        of_lse = load_of_lse(d_lse, of_constant, plane * queries + row, inside)
        d_logits = logit_gradients(
            weights,
            peak[:, None],
            shifted,
            into,
            of_constant[:, None],
            of_lse[:, None],
            of_entropy[:, None],
            surprise[:, None],
            d_entropy is not None,
        )
        d_logits = tl.where(seen, d_logits * slope, 0.0)
        if SUMS > 0:
            from_pivot += tl.sum(tl.where(seen, d_logits * (products - pivot[:, None]), 0.0), 1)
        if d_query is not None:
            d_products = d_logits * factor[:, None]
            if CAREFUL:
                # 0 · NaN is NaN: what is not finite reaches only rows that see it.
                gradient += spoilt(seen, k)
                k = cleaned(k)
            gradient += product(d_products.to(k.dtype), k)

    if d_query is not None:
        store_rows(d_query, places, gradient, again, WIDTH, BLOCK_D)
    if SUMS > 0:
        sums += plane * queries + row
        tl.store(sums, from_pivot, mask=inside)
        if SUMS == 3:
            tl.store(sums + figure_stride, flowing, mask=inside)
            tl.store(sums + 2 * figure_stride, swinging, mask=inside)
