"""The kernels: a block of rows over its share of the keys, and the joining of the shares.

A program has BLOCK_M rows and one head of keys. PACKED: its rows are those of all heads that share the key head, one head after
another; otherwise of one head. SPLIT: the keys are dealt to several programs, which leave their sums to `join`. MEND: the output
is there already, and is computed again where it is no number: an invisible value that is not finite has met a weight of 0 there.
"""

import triton
import triton.language as tl

from attemper.kernels.triton_common import (
    FLOAT_MASK,
    NO_MASK,
    end_of_keys,
    first_key,
    in_reach,
    kept,
    load_rows,
    logits_of,
    masked,
    offsets_of,
    product,
    store_rows,
)
from attemper.kernels.triton_forward.rows import (
    joined,
    lowest_of,
    nothing_seen,
    shift_of,
    with_sink,
    with_tile,
)
from attemper.kernels.triton_problem import UNSPECIALIZED


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "rows", "blocks", "splits"])
def attend(
    query,
    key,
    value,
    mask,
    scale,
    sinks,
    query_batch,
    query_head,
    query_row,
    query_column,
    key_batch,
    key_head,
    key_row,
    key_column,
    value_batch,
    value_head,
    value_row,
    value_column,
    mask_batch,
    mask_head,
    mask_row,
    mask_column,
    scale_batch,
    scale_head,
    scale_row,
    queries,
    keys,
    heads,
    groups,
    row_step,
    low,
    high,
    softcap,
    inverse_softcap,
    mask_limit,
    seed_low,
    seed_high,
    threshold,
    keep_factor,
    output,
    unrounded,
    lse,
    entropy,
    rest,
    figures,
    sums_of_splits,
    counts_of_splits,
    rows,
    blocks,
    splits,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MASK: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr,
    STATISTICS: tl.constexpr,
    PACKED: tl.constexpr,
    SPLIT: tl.constexpr,
    MEND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """softmax(z) v of a block of rows over one share of the keys, and the sums of the record."""
    PLAIN: tl.constexpr = MASK != FLOAT_MASK and not SOFTCAP
    PIVOT: tl.constexpr = MASK == FLOAT_MASK and not SOFTCAP and sinks is None and figures is not None
    HAS_VALUE: tl.constexpr = value is not None

    number = tl.program_id(0)
    split = number % splits
    block = (number // splits) % blocks
    pair = number // splits // blocks
    if RIGHT:  # the blocks that see most begin first
        block = blocks - 1 - block
    within = block * BLOCK_M + tl.arange(0, BLOCK_M)
    if PACKED:
        kv_heads = heads // groups
        batch, kv_head = pair // kv_heads, pair % kv_heads
        head, row = kv_head * groups + within // queries, within % queries
        inside = within < groups * queries
        first_row, last_row = block * 0, block * 0 + queries - 1
    else:
        batch, head, row = pair // heads, pair % heads, within
        kv_head = head // groups
        inside = row < queries
        first_row, last_row = block * BLOCK_M, tl.minimum(block * BLOCK_M + BLOCK_M, queries) - 1
    flat = (batch * heads + head).to(tl.int64) * queries + row
    if MEND:
        found = load_rows(output, flat * VALUE_WIDTH, 1, inside, VALUE_WIDTH, BLOCK_V)
        if tl.max(tl.max((found != found).to(tl.int32), 1), 0) == 0:
            return

    query_tile = load_rows(
        query, offsets_of(batch, head, row, query_batch, query_head, query_row), query_column, inside, WIDTH, BLOCK_D
    )
    factors = tl.load(scale + offsets_of(batch, head, row, scale_batch, scale_head, scale_row), mask=inside, other=0.0)
    key += offsets_of(batch, kv_head, kv_head * 0, key_batch, key_head, key_row)
    if HAS_VALUE:
        value += offsets_of(batch, kv_head, kv_head * 0, value_batch, value_head, value_row)
    mask_offsets = offsets_of(batch, head, row, mask_batch, mask_head, mask_row)
    first = first_key(row, row_step, low, LEFT)
    end = tl.where(inside, end_of_keys(row, row_step, high, keys, RIGHT), 0)

    # Tiles [start, stop) are this program's; in [full_start, full_stop) every row sees every key.
    start = first_key(first_row, row_step, low, LEFT) // BLOCK_N
    stop = tl.maximum(tl.cdiv(end_of_keys(last_row, row_step, high, keys, RIGHT), BLOCK_N), start)
    share = tl.cdiv(stop - start, splits)
    start, stop = start + split * share, tl.minimum(stop, start + split * share + share)
    full_start = tl.minimum(
        tl.maximum(tl.cdiv(first_key(last_row, row_step, low, LEFT), BLOCK_N), start), tl.maximum(stop, start)
    )
    full_stop = tl.maximum(tl.minimum(end_of_keys(first_row, row_step, high, keys, RIGHT) // BLOCK_N, stop), full_start)

    sums = nothing_seen(BLOCK_M)
    weighted_values = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    # First the tiles that are seen whole, then those on either side of them; with a mask, all are of the second kind.
    IN_PARTS: tl.constexpr = MASK != NO_MASK or MEND
    for phase in tl.static_range(1 if IN_PARTS else 0, 2):
        before = full_start - start
        count = stop - start
        if not IN_PARTS:
            count = full_stop - full_start if phase == 0 else before + stop - full_stop
        for i in tl.range(0, count, num_stages=1 if phase == 1 and not IN_PARTS else None):
            if phase == 0:
                tile = full_start + i
            else:
                tile = start + i
                if not IN_PARTS:
                    tile = tl.where(i < before, tile, full_stop + i - before)
            columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            there = columns < keys
            key_tile = load_rows(key, columns.to(tl.int64) * key_row, key_column, there, WIDTH, BLOCK_D)
            products = product(query_tile, tl.trans(key_tile))
            logits = logits_of(products, factors, softcap, inverse_softcap, SOFTCAP)
            seen = in_reach(columns, first, end, LEFT)
            logits, seen = masked(logits, seen, mask, mask_offsets, columns, mask_column, mask_limit, MASK)
            if MASK != NO_MASK:
                visible = tl.sum(seen.to(tl.int32), 1)
            else:
                visible = tl.minimum(end, tile * BLOCK_N + BLOCK_N) - tl.maximum(first, tile * BLOCK_N)
                visible = tl.maximum(visible, 0)
            sums, weights, shrink = with_tile(
                sums,
                products,
                logits,
                seen,
                visible,
                factors,
                first,
                columns,
                phase == 0,
                MASK != NO_MASK,
                STATISTICS,
                PLAIN,
                PIVOT,
            )
            if HAS_VALUE:
                if DROPOUT:
                    keep = kept(batch, head, row, tile * BLOCK_N, seed_low, seed_high, threshold, BLOCK_N)
                    weights = tl.where(keep, weights, 0.0)
                value_tile = load_rows(value, columns.to(tl.int64) * value_row, value_column, there, VALUE_WIDTH, BLOCK_V)
                if MEND:
                    weighted_values = _mended(weighted_values, shrink, weights, seen & there[None, :], value_tile)
                else:
                    weighted_values = weighted_values * shrink[:, None]
                    weighted_values += product(weights.to(value_tile.dtype), value_tile)

    if SPLIT:
        place = flat + split.to(tl.int64) * rows
        field = splits.to(tl.int64) * rows
        _store_sums(sums, sums_of_splits, counts_of_splits, place, field, inside, STATISTICS)
        if HAS_VALUE:
            store_rows(output, place * VALUE_WIDTH, weighted_values, inside, VALUE_WIDTH, BLOCK_V)
    else:
        _finish(
            sums,
            weighted_values,
            factors,
            head,
            sinks,
            output,
            unrounded,
            lse,
            entropy,
            rest,
            figures,
            rows,
            flat,
            inside,
            keep_factor,
            VALUE_WIDTH,
            BLOCK_V,
            SOFTCAP,
            DROPOUT,
            STATISTICS,
            PLAIN,
            PIVOT,
        )


@triton.jit
def _mended(weighted_values, shrink, weights, seen, value_tile):
    """The sum with a tile of values taken in; those that are not finite are shown where they are visible, and only there."""
    weighted_values = tl.where(tl.abs(weighted_values) == float("inf"), weighted_values, weighted_values * shrink[:, None])
    finite = tl.abs(value_tile) < float("inf")
    weighted_values += product(weights.to(value_tile.dtype), tl.where(finite, value_tile, 0.0).to(value_tile.dtype))
    shown = seen.to(value_tile.dtype)
    above = product(shown, (value_tile == float("inf")).to(value_tile.dtype))
    weighted_values += tl.where(above > 0.0, float("inf"), 0.0)
    below = product(shown, (value_tile == float("-inf")).to(value_tile.dtype))
    weighted_values += tl.where(below > 0.0, float("-inf"), 0.0)
    neither = product(shown, (value_tile != value_tile).to(value_tile.dtype))
    return weighted_values + tl.where(neither > 0.0, float("nan"), 0.0)


@triton.jit(do_not_specialize=["queries", "heads", "keep_factor", "rows", "splits"])
def join(
    output_of_splits,
    sums_of_splits,
    counts_of_splits,
    scale,
    scale_batch,
    scale_head,
    scale_row,
    sinks,
    queries,
    heads,
    keep_factor,
    output,
    unrounded,
    lse,
    entropy,
    rest,
    figures,
    rows,
    splits,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr,
    STATISTICS: tl.constexpr,
    PLAIN: tl.constexpr,
    PIVOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """The results of a block of rows, by the sums and the outputs that the splits left."""
    flat = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = flat < rows
    row, head, batch = flat % queries, flat // queries % heads, flat // queries // heads
    factors = tl.load(scale + offsets_of(batch, head, row, scale_batch, scale_head, scale_row), mask=inside, other=0.0)
    field = splits.to(tl.int64) * rows
    sums = nothing_seen(BLOCK_M)
    weighted_values = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    for split in range(splits):
        place = flat + (flat * 0 + rows) * split
        others = _load_sums(sums_of_splits, counts_of_splits, place, field, inside, BLOCK_M, STATISTICS)
        sums, shrink, shrink_others = joined(sums, others, STATISTICS)
        if output_of_splits is not None:
            part = load_rows(output_of_splits, place * VALUE_WIDTH, 1, inside, VALUE_WIDTH, BLOCK_V)
            # What has no weight says nothing, even where it is infinite.
            part = tl.where(shrink_others[:, None] == 0.0, 0.0, part * shrink_others[:, None])
            weighted_values = tl.where(shrink[:, None] == 0.0, 0.0, weighted_values * shrink[:, None]) + part
    _finish(
        sums,
        weighted_values,
        factors,
        head,
        sinks,
        output,
        unrounded,
        lse,
        entropy,
        rest,
        figures,
        rows,
        flat,
        inside,
        keep_factor,
        VALUE_WIDTH,
        BLOCK_V,
        SOFTCAP,
        DROPOUT,
        STATISTICS,
        PLAIN,
        PIVOT,
    )


@triton.jit
def _store_sums(sums, floats, counts, place, field, inside, STATISTICS: tl.constexpr):
    """Leave the sums of a split: floats [11, splits, rows], counts [2, splits, rows]; `field` is splits · rows."""
    top, total, weighted, squares, cubes, count, deviation, spread, lowest, key, product_max, product_min, pivot = sums
    tl.store(floats + place, top, mask=inside)
    tl.store(floats + field + place, total, mask=inside)
    tl.store(floats + 2 * field + place, product_max, mask=inside)
    if STATISTICS:
        tl.store(floats + 3 * field + place, weighted, mask=inside)
        tl.store(floats + 4 * field + place, squares, mask=inside)
        tl.store(floats + 5 * field + place, cubes, mask=inside)
        tl.store(floats + 6 * field + place, deviation, mask=inside)
        tl.store(floats + 7 * field + place, spread, mask=inside)
        tl.store(floats + 8 * field + place, lowest, mask=inside)
        tl.store(floats + 9 * field + place, product_min, mask=inside)
        tl.store(floats + 10 * field + place, pivot, mask=inside)
        tl.store(counts + place, count, mask=inside)
        tl.store(counts + field + place, key, mask=inside)


@triton.jit
def _load_sums(floats, counts, place, field, inside, BLOCK_M: tl.constexpr, STATISTICS: tl.constexpr):
    """The sums that `_store_sums` left."""
    top, total, weighted, squares, cubes, count, deviation, spread, lowest, key, product_max, product_min, pivot = nothing_seen(
        BLOCK_M
    )
    top = tl.load(floats + place, mask=inside, other=float("-inf"))
    total = tl.load(floats + field + place, mask=inside, other=0.0)
    product_max = tl.load(floats + 2 * field + place, mask=inside, other=float("-inf"))
    if STATISTICS:
        weighted = tl.load(floats + 3 * field + place, mask=inside, other=0.0)
        squares = tl.load(floats + 4 * field + place, mask=inside, other=0.0)
        cubes = tl.load(floats + 5 * field + place, mask=inside, other=0.0)
        deviation = tl.load(floats + 6 * field + place, mask=inside, other=0.0)
        spread = tl.load(floats + 7 * field + place, mask=inside, other=0.0)
        lowest = tl.load(floats + 8 * field + place, mask=inside, other=float("inf"))
        product_min = tl.load(floats + 9 * field + place, mask=inside, other=float("inf"))
        pivot = tl.load(floats + 10 * field + place, mask=inside, other=0.0)
        count = tl.load(counts + place, mask=inside, other=0)
        key = tl.load(counts + field + place, mask=inside, other=-1)
    return top, total, weighted, squares, cubes, count, deviation, spread, lowest, key, product_max, product_min, pivot


@triton.jit
def _finish(
    sums,
    weighted_values,
    factors,
    head,
    sinks,
    output,
    unrounded,
    lse,
    entropy,
    rest,
    figures,
    rows,
    flat,
    inside,
    keep_factor,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr,
    STATISTICS: tl.constexpr,
    PLAIN: tl.constexpr,
    PIVOT: tl.constexpr,
):
    """Take in the sink, divide by the total, and write all results of the rows `flat` of [batch, heads, queries]."""
    largest = sums[0]
    if sinks is not None:
        sums, shrink = with_sink(sums, tl.load(sinks + head + flat * 0, mask=inside, other=0.0), STATISTICS)
        weighted_values = weighted_values * shrink[:, None]
    top, total, weighted, squares, cubes, count, deviation, spread, lowest, place, product_max, product_min, pivot = sums
    nothing = top == float("-inf")
    total = tl.where(nothing, 1.0, total)
    log_total = tl.log(total)
    if output is not None:
        weighted_values = weighted_values / total[:, None]
        if DROPOUT:
            weighted_values = weighted_values * keep_factor
        store_rows(output, flat * VALUE_WIDTH, weighted_values, inside, VALUE_WIDTH, BLOCK_V)
        if unrounded is not None:
            store_rows(unrounded, flat * VALUE_WIDTH, weighted_values, inside, VALUE_WIDTH, BLOCK_V)
    if figures is not None:
        field = flat * 0 + rows
        tl.store(figures + flat, shift_of(top), mask=inside)
        tl.store(figures + field + flat, log_total, mask=inside)
        if sinks is not None or SOFTCAP:
            near = top * 0.0
        elif STATISTICS or PIVOT:
            near = product_max
        else:
            near = largest / factors
        tl.store(figures + 2 * field + flat, tl.where(tl.abs(near) < float("inf"), near, 0.0), mask=inside)
    if lse is not None:
        tl.store(lse + flat, tl.where(nothing, float("-inf"), top + log_total), mask=inside)
        if not STATISTICS:
            tl.store(entropy + flat, total * float("nan"), mask=inside)
    if STATISTICS:
        tl.store(entropy + flat, tl.where(nothing, 0.0, log_total - weighted / total), mask=inside)
        field = flat * 0 + rows
        if PLAIN:
            lowest = lowest_of(factors, product_max, product_min, largest, count)
        seen = tl.maximum(count, 1).to(tl.float32)
        squared = total * total
        tl.store(rest + flat, count.to(tl.float32), mask=inside)
        tl.store(rest + field + flat, largest, mask=inside)
        tl.store(rest + 2 * field + flat, lowest, mask=inside)
        tl.store(rest + 3 * field + flat, place.to(tl.float32), mask=inside)
        tl.store(rest + 4 * field + flat, pivot + deviation / seen, mask=inside)
        tl.store(rest + 5 * field + flat, spread / seen, mask=inside)
        tl.store(rest + 6 * field + flat, squares / squared, mask=inside)
        tl.store(rest + 7 * field + flat, cubes / (squared * total), mask=inside)
        tl.store(rest + 8 * field + flat, product_max, mask=inside)
        tl.store(rest + 9 * field + flat, product_min, mask=inside)
