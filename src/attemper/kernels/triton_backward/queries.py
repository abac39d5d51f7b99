"""The gradient of the queries, and the sums of each row from which the gradient of a learned scale follows."""

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
def query_gradients(
    query, key, value, mask, scale, figures, entropy, constant, d_output, d_entropy, d_query, sums,
    query_batch, query_head, query_row, query_column, key_batch, key_head, key_row, key_column,
    value_batch, value_head, value_row, value_column, mask_batch, mask_head, mask_row, mask_column,
    scale_batch, scale_head, scale_row, flow_batch, flow_head, flow_row, flow_column, figure_stride,
    queries, keys, heads, groups, row_step, low, high, softcap, inverse_softcap, mask_limit,
    seed_low, seed_high, threshold, keep_factor,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, MASK: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, SUMS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program walks from one block of queries of one head over the keys in reach.

    d_query: [batch, heads, queries, WIDTH] or None; sums: [SUMS, batch, heads, queries], Σ dz·(u − pivot), back through the cap,
    and where SUMS is 3 Σ p·dp and Σ p·(u − pivot), the latter back through the cap.
    """
    blocks = tl.cdiv(queries, BLOCK_M)
    # The last blocks of queries see the most keys under a causal rule: they begin first.
    start_row = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M
    plane = (tl.program_id(0) // blocks).to(tl.int64)
    batch, head = (plane // heads).to(tl.int32), (plane % heads).to(tl.int32)
    row = start_row + tl.arange(0, BLOCK_M)
    inside = row < queries
    last_row = tl.minimum(start_row + BLOCK_M, queries) - 1

    q = load_rows(query, offsets_of(batch, head, row, query_batch, query_head, query_row), query_column, inside, WIDTH, BLOCK_D)
    flow = q
    if d_output is not None:
        flow_offsets = offsets_of(batch, head, row, flow_batch, flow_head, flow_row)
        flow = load_rows(d_output, flow_offsets, flow_column, inside, VALUE_WIDTH, BLOCK_V)
    factor, shift, peak, surprise, of_constant, of_entropy = load_terms(
        scale, figures, entropy, constant, d_entropy, batch, head, row, inside, plane, figure_stride, queries,
        scale_batch, scale_head, scale_row,
    )  # fmt: skip
    first = first_key(row, row_step, low, LEFT)
    end = tl.where(inside, end_of_keys(row, row_step, high, keys, RIGHT), 0)
    mask_offsets = offsets_of(batch, head, row, mask_batch, mask_head, mask_row)
    key_offset = offsets_of(batch, head // groups, start_row * 0, key_batch, key_head, key_row)
    value_offset = offsets_of(batch, head // groups, start_row * 0, value_batch, value_head, value_row)
    pivot = shift
    if SUMS > 0:
        pivot = tl.load(figures + 2 * figure_stride + plane * queries + row, mask=inside, other=0.0)
    gradient = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    from_pivot = tl.zeros([BLOCK_M], tl.float32)
    flowing = tl.zeros([BLOCK_M], tl.float32)
    swinging = tl.zeros([BLOCK_M], tl.float32)

    # Tiles at the left edge of what is in reach, whole tiles, tiles at the right edge; under a mask there are no whole ones.
    begin = first_key(start_row, row_step, low, LEFT) // BLOCK_N * BLOCK_N
    stop = end_of_keys(last_row, row_step, high, keys, RIGHT)
    whole, rest = begin, begin
    if MASK == NO_MASK:
        whole = tl.cdiv(first_key(last_row, row_step, low, LEFT), BLOCK_N) * BLOCK_N
        whole = tl.minimum(tl.maximum(whole, begin), tl.maximum(stop, begin))
        rest = tl.maximum(end_of_keys(start_row, row_step, high, keys, RIGHT) // BLOCK_N * BLOCK_N, whole)
    for part in tl.static_range(3):
        if (part == 0 and LEFT) or (part == 1 and MASK == NO_MASK) or part == 2:
            from_key = begin if part == 0 else whole if part == 1 else rest
            to_key = whole if part == 0 else rest if part == 1 else stop
            for start in range(from_key, to_key, BLOCK_N):
                gradient, from_pivot, flowing, swinging = _add_tile(
                    gradient, from_pivot, flowing, swinging, q, flow, start, batch, head, row, first, end,
                    factor, shift, peak, surprise, of_constant, of_entropy, pivot,
                    key, key_offset, key_row, key_column, value, value_offset, value_row, value_column,
                    mask, mask_offsets, mask_column, mask_limit, keys, softcap, inverse_softcap,
                    seed_low, seed_high, threshold, keep_factor,
                    WIDTH, VALUE_WIDTH, BLOCK_D, BLOCK_V, MASK, LEFT, SOFTCAP, DROPOUT, SUMS, BLOCK_N,
                    part == 1, d_output is not None, d_entropy is not None, d_query is not None,
                )  # fmt: skip

    if d_query is not None:
        store_rows(d_query, (plane * queries + row) * WIDTH, gradient, inside, WIDTH, BLOCK_D)
    if SUMS > 0:
        places = sums + plane * queries + row
        tl.store(places, from_pivot, mask=inside)
        if SUMS == 3:
            tl.store(places + figure_stride, flowing, mask=inside)
            tl.store(places + 2 * figure_stride, swinging, mask=inside)


@triton.jit
def _add_tile(
    gradient, from_pivot, flowing, swinging, q, flow, start, batch, head, row, first, end,
    factor, shift, peak, surprise, constant, d_entropy, pivot,
    key, key_offset, key_row, key_column, value, value_offset, value_row, value_column,
    mask, mask_offsets, mask_column, mask_limit, keys, softcap, inverse_softcap, seed_low, seed_high, threshold, keep_factor,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, MASK: tl.constexpr,
    LEFT: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, SUMS: tl.constexpr, BLOCK_N: tl.constexpr,
    WHOLE: tl.constexpr, FLOWS: tl.constexpr, ENTROPY: tl.constexpr, NEEDED: tl.constexpr,
):  # fmt: skip
    """What the keys from `start` on add to each sum. WHOLE: every row sees all of them."""
    columns = start + tl.arange(0, BLOCK_N)
    # [keys, BLOCK_D]
    k = load_rows(key, key_offset + columns.to(tl.int64) * key_row, key_column, columns < keys, WIDTH, BLOCK_D)
    products = product(q, tl.trans(k))
    BIASED: tl.constexpr = MASK == FLOAT_MASK and not WHOLE
    bias = 0.0
    if not WHOLE:
        bias, seen = bias_and_seen(first, end, columns, mask, mask_offsets, mask_column, mask_limit, LEFT, MASK)
    weights, shifted, slope = weights_again(
        products, factor[:, None], shift[:, None], peak[:, None], softcap, inverse_softcap, bias, SOFTCAP, BIASED
    )
    into = tl.zeros(products.shape, tl.float32)
    if FLOWS:
        # [keys, BLOCK_V]
        value_offsets = value_offset + columns.to(tl.int64) * value_row
        v = load_rows(value, value_offsets, value_column, columns < keys, VALUE_WIDTH, BLOCK_V)
        into = product(flow, tl.trans(v))
        if DROPOUT:
            into *= tl.where(kept(batch, head, row, start, seed_low, seed_high, threshold, BLOCK_N), keep_factor, 0.0)
    flows = weights * into
    d_logits = slope * logit_gradients(
        weights, shifted, into, constant[:, None], d_entropy[:, None], surprise[:, None], ENTROPY
    )
    if SUMS > 0:
        away = products - pivot[:, None]
        swings = weights * slope * away
        if WHOLE:
            from_pivot += tl.sum(d_logits * away, 1)
        else:
            from_pivot += tl.sum(tl.where(seen, d_logits * away, 0.0), 1)
            flows = tl.where(seen, flows, 0.0)
            swings = tl.where(seen, swings, 0.0)
        if SUMS == 3:
            flowing += tl.sum(flows, 1)
            swinging += tl.sum(swings, 1)
    if NEEDED:
        d_products = d_logits * factor[:, None]
        if not WHOLE:
            # 0 · NaN is NaN: what is not finite reaches only rows that see it.
            d_products = tl.where(seen, d_products + broken(k)[None, :], 0.0)
            k = cleaned(k)
        gradient += product(d_products.to(k.dtype), k)
    return gradient, from_pivot, flowing, swinging
