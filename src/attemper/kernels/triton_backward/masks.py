"""The gradient of a float mask, summed over all that one of its numbers serves."""

import triton
import triton.language as tl

from attemper.kernels.triton_backward.tiles import bias_and_seen, load_of_lse, load_terms, logit_gradients, weights_again
from attemper.kernels.triton_common import end_of_keys, first_key, kept, load_rows, offsets_of, product
from attemper.kernels.triton_problem import UNSPECIALIZED


@triton.jit(do_not_specialize=(*UNSPECIALIZED, "batches", "mask_batches", "mask_heads", "mask_queries", "mask_keys"))
def mask_gradients(
    query, key, value, mask, scale, figures, entropy, constant, d_output, d_lse, d_entropy, d_mask,
    query_batch, query_head, query_row, query_column, key_batch, key_head, key_row, key_column,
    value_batch, value_head, value_row, value_column, mask_batch, mask_head, mask_row, mask_column,
    scale_batch, scale_head, scale_row, flow_batch, flow_head, flow_row, flow_column, figure_stride,
    batches, queries, keys, heads, groups, mask_batches, mask_heads, mask_queries, mask_keys,
    row_step, low, high, softcap, inverse_softcap, mask_limit, seed_low, seed_high, threshold, keep_factor,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, MASK: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program walks over all batches, heads, rows and keys that a tile of the mask serves.

    d_mask: [mask_batches, mask_heads, mask_queries, mask_keys], each of these 1 or as many as there are.
    """
    key_parts = tl.cdiv(mask_keys, BLOCK_N)
    row_parts = tl.cdiv(mask_queries, BLOCK_M)
    start_key = tl.program_id(0) % key_parts * BLOCK_N
    start_row = tl.program_id(0) // key_parts % row_parts * BLOCK_M
    mask_plane = tl.program_id(0) // key_parts // row_parts
    mask_of_batch, mask_of_head = mask_plane // mask_heads, mask_plane % mask_heads

    # What the tile serves; where the mask has one number for many, all of them.
    first_batch, end_batch = mask_of_batch, mask_of_batch + 1
    first_head, end_head = mask_of_head, mask_of_head + 1
    end_row, end_key = tl.minimum(start_row + BLOCK_M, queries), tl.minimum(start_key + BLOCK_N, keys)
    if mask_batches == 1:
        first_batch, end_batch = 0, batches
    if mask_heads == 1:
        first_head, end_head = 0, heads
    if mask_queries == 1:
        end_row = queries
    if mask_keys == 1:
        end_key = keys

    gradient = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    lost = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for batch_number in range(first_batch, end_batch):
        for head_number in range(first_head, end_head):
            batch, head = mask_of_batch * 0 + batch_number, mask_of_head * 0 + head_number
            plane = batch.to(tl.int64) * heads + head
            for from_row in range(start_row, end_row, BLOCK_M):
                row = from_row + tl.arange(0, BLOCK_M)
                inside = row < queries
                last_row = tl.minimum(from_row + BLOCK_M, queries) - 1
                query_offsets = offsets_of(batch, head, row, query_batch, query_head, query_row)
                q = load_rows(query, query_offsets, query_column, inside, WIDTH, BLOCK_D)
                factor, shift, peak, surprise, of_constant, of_entropy = load_terms(
                    scale, figures, entropy, constant, d_entropy, batch, head, row, inside, plane, figure_stride, queries,
                    scale_batch, scale_head, scale_row,
                )  # fmt: skip
                first = first_key(row, row_step, low, LEFT)
                end = tl.where(inside, end_of_keys(row, row_step, high, keys, RIGHT), 0)
                mask_offsets = offsets_of(batch, head, row, mask_batch, mask_head, mask_row)
                begin = tl.maximum(first_key(from_row, row_step, low, LEFT) // BLOCK_N * BLOCK_N, start_key)
                stop = tl.minimum(end_of_keys(last_row, row_step, high, keys, RIGHT), end_key)
                for start in range(begin, stop, BLOCK_N):
                    columns = start + tl.arange(0, BLOCK_N)
                    here = columns < keys
                    key_offsets = offsets_of(batch, head // groups, columns, key_batch, key_head, key_row)
                    k = load_rows(key, key_offsets, key_column, here, WIDTH, BLOCK_D)
                    products = product(q, tl.trans(k))
                    bias, seen = bias_and_seen(first, end, columns, mask, mask_offsets, mask_column, mask_limit, LEFT, MASK)
                    weights, shifted, _ = weights_again(
                        products, factor[:, None], shift[:, None], peak[:, None], softcap, inverse_softcap, bias, SOFTCAP, True
                    )
                    into = tl.zeros(products.shape, tl.float32)
                    if d_output is not None:
                        flow_offsets = offsets_of(batch, head, row, flow_batch, flow_head, flow_row)
                        flow = load_rows(d_output, flow_offsets, flow_column, inside, VALUE_WIDTH, BLOCK_V)
                        value_offsets = offsets_of(batch, head // groups, columns, value_batch, value_head, value_row)
                        v = load_rows(value, value_offsets, value_column, here, VALUE_WIDTH, BLOCK_V)
                        into = product(flow, tl.trans(v))
                        if DROPOUT:
                            keep = kept(batch, head, row, start, seed_low, seed_high, threshold, BLOCK_N)
                            into *= tl.where(keep, keep_factor, 0.0)
                    of_lse = load_of_lse(d_lse, of_constant, plane * queries + row, inside)
                    d_logits = logit_gradients(
                        weights, peak[:, None], shifted, into, of_constant[:, None], of_lse[:, None], of_entropy[:, None],
                        surprise[:, None], d_entropy is not None,
                    )  # fmt: skip
                    # One number may serve millions of logits: what an addition rounds away is added with the next (Kahan 1965).
                    addend = tl.where(seen, d_logits, 0.0) - lost
                    total = gradient + addend
                    lost = (total - gradient) - addend
                    gradient = total

    rows, columns = start_row + tl.arange(0, BLOCK_M), start_key + tl.arange(0, BLOCK_N)
    if mask_queries == 1:
        gradient = tl.sum(gradient, 0)[None, :] + tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if mask_keys == 1:
        gradient = tl.sum(gradient, 1)[:, None] + tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    places = (mask_plane.to(tl.int64) * mask_queries + rows.to(tl.int64)[:, None]) * mask_keys + columns[None, :]
    served = (rows < mask_queries)[:, None] & (columns < mask_keys)[None, :]
    tl.store(d_mask + places, gradient.to(d_mask.dtype.element_ty), mask=served)
