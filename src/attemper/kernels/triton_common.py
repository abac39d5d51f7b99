"""What both directions of the Triton kernels compute of a tile: places, visibility, logits, and what dropout keeps.

What it must hold:
- the arguments are those of `triton_problem.arguments`, under the same names;
- a tile is [rows, keys]; a row is a query of one head, a column one key; offsets in memory are 64-bit;
- what is invisible never enters arithmetic that could spread it: it is replaced by selection, not by multiplication.
"""

import triton
import triton.language as tl

# The interpreter computes with numpy, which lacks a reduction that passes NaN on.
INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))

NO_MASK: tl.constexpr = tl.constexpr(0)
BOOL_MASK: tl.constexpr = tl.constexpr(1)
FLOAT_MASK: tl.constexpr = tl.constexpr(2)


@triton.jit
def offsets_of(batch, head, row, batch_stride, head_stride, row_stride):
    """Where rows begin in memory, int64, in the shape of `row` (and `head`)."""
    return batch.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride + row.to(tl.int64) * row_stride


@triton.jit
def load_rows(tensor, offsets, column_stride, inside, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """[rows, BLOCK] of rows that begin at `offsets` [rows]; 0 beyond WIDTH and in rows that are not `inside` [rows]."""
    columns = tl.arange(0, BLOCK)
    pointers = tensor + offsets[:, None] + (columns.to(tl.int64) * column_stride)[None, :]
    there = inside[:, None]
    if BLOCK != WIDTH:
        there = there & (columns < WIDTH)[None, :]
    return tl.load(pointers, mask=there, other=0.0)


@triton.jit
def store_rows(tensor, offsets, values, inside, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Write [rows, BLOCK] to rows that begin at `offsets` [rows] and lie in one piece."""
    columns = tl.arange(0, BLOCK)
    keep = inside[:, None] & (columns < WIDTH)[None, :]
    tl.store(tensor + offsets[:, None] + columns[None, :], values.to(tensor.dtype.element_ty), mask=keep)


@triton.jit
def product(a, b):
    """a @ b, accumulated in float32; of float32 in full precision."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def first_key(row, row_step, low, LEFT: tl.constexpr):
    """The first key that position lets a query see, not below 0; it never falls from one query to the next."""
    return tl.maximum(row * row_step + low, 0) if LEFT else row * 0


@triton.jit
def end_of_keys(row, row_step, high, keys, RIGHT: tl.constexpr):
    """One past the last key that position lets a query see, not above `keys`; it never falls from one query to the next."""
    return tl.minimum(row * row_step + high + 1, keys) if RIGHT else row * 0 + keys


@triton.jit
def in_reach(columns, first, end, LEFT: tl.constexpr):
    """Bool [rows, keys]: which keys lie in each row's half-open range; no key does in a row whose `end` is 0."""
    seen = columns[None, :] < end[:, None]
    if LEFT:
        seen = seen & (columns[None, :] >= first[:, None])
    return seen


@triton.jit
def tanh(x):
    """The hyperbolic tangent to less than two roundings.

    x + x³·P(x²) up to 1, with P fitted to the smallest largest error relative to the tangent; 1 − 2 / (1 + e^2|x|) above.
    """
    size = tl.abs(x)
    squared = x * x
    fit = -3.584496474e-4
    fit = fit * squared + 2.301356416e-3
    fit = fit * squared - 7.946095274e-3
    fit = fit * squared + 2.148665004e-2
    fit = fit * squared - 5.387980011e-2
    fit = fit * squared + 1.333234453e-1
    fit = fit * squared - 3.333329543e-1
    near = x + x * squared * fit
    far = 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0)
    return tl.where(size < 1.0, near, tl.where(x < 0.0, -far, far))


@triton.jit
def logits_of(products, factors, softcap, inverse_softcap, SOFTCAP: tl.constexpr):
    """z before the mask, [rows, keys], of the products and each row's factor [rows]."""
    logits = products * factors[:, None]
    if SOFTCAP:
        logits = softcap * tanh(logits * inverse_softcap)
    return logits


@triton.jit
def masked(logits, seen, mask, mask_offsets, columns, mask_column, mask_limit, MASK: tl.constexpr):
    """(logits with the mask added, who is visible), [rows, keys]; what the logits are elsewhere is nobody's business.

    Args: `seen`: who is visible but for the mask; `mask_offsets`: where the rows of the mask begin, [rows].
    """
    if MASK != NO_MASK:
        pointers = mask + mask_offsets[:, None] + (columns.to(tl.int64) * mask_column)[None, :]
        given = tl.load(pointers, mask=seen, other=0)
        if MASK == BOOL_MASK:
            seen = seen & (given != 0)
        else:
            bias = given.to(tl.float32)
            seen = seen & ~(bias <= mask_limit)  # NaN is visible
            logits = logits + tl.where(seen, bias, 0.0)
    return logits, seen


@triton.jit
def kept(batch, head, row, start, seed_low, seed_high, threshold, BLOCK_N: tl.constexpr):
    """Bool [rows, BLOCK_N]: which weights dropout keeps, by the generator of `attemper.kernels.dropout`.

    Args: `row`: [rows]; `head`: [rows] or one for all; `start`: the tile's first key, a multiple of 4.
    """
    low = seed_low.to(tl.uint32, bitcast=True).to(tl.uint64)
    high = seed_high.to(tl.uint32, bitcast=True).to(tl.uint64)
    fours = start // 4 + tl.arange(0, BLOCK_N // 4)
    heads = row * 0 + head
    word0, word1, word2, word3 = tl.philox((high << 32) | low, fours[None, :], row[:, None], heads[:, None], batch)
    least = threshold.to(tl.uint32, bitcast=True)
    even = tl.join((word0 >= least).to(tl.int8), (word2 >= least).to(tl.int8))
    odd = tl.join((word1 >= least).to(tl.int8), (word3 >= least).to(tl.int8))
    return tl.reshape(tl.join(even, odd), (row.shape[0], BLOCK_N)) != 0


@triton.jit
def larger(a, b):
    """The larger of two, NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(a, b):
    """The smaller of two, NaN if either is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_of_row(x):
    """The largest of each row of [rows, keys], NaN if one of them is."""
    if INTERPRETED:
        broken = tl.sum((x != x).to(tl.int32), 1) > 0
        found = tl.where(broken, float("nan"), tl.max(tl.where(x != x, float("-inf"), x), 1))
    else:
        found = tl.reduce(x, 1, larger)
    return found


@triton.jit
def smallest_of_row(x):
    """The smallest of each row of [rows, keys], NaN if one of them is."""
    if INTERPRETED:
        broken = tl.sum((x != x).to(tl.int32), 1) > 0
        found = tl.where(broken, float("nan"), tl.min(tl.where(x != x, float("inf"), x), 1))
    else:
        found = tl.reduce(x, 1, smaller)
    return found
