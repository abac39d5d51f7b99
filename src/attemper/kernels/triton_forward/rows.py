"""The sums of a block of rows from which output and record follow, and how they grow: [rows] each, in one tuple.

top: the largest logit; total, squares, cubes: Σ e, Σ e², Σ e³ with e = e^(z − top); weighted: Σ e·(z − top); count: of visible
keys; deviation: Σ (z − pivot); spread: Σ (z − mean)²; lowest: the smallest logit, where it does not follow from the products;
place: the key with the largest; product_max, product_min; pivot: the mean of some of the keys, rounded. Where `top` is −∞ it
counts as 0 in the differences.
"""

# ruff: noqa: RUF005 -- Triton knows no stars in a tuple

import triton
import triton.language as tl

from attemper.kernels.triton_common import larger, largest_of_row, smaller, smallest_of_row

# e^x is 0 in float32 from −104 on: there x takes no part in Σ e·x, where −∞ would make it NaN.
NO_WEIGHT: tl.constexpr = tl.constexpr(-200.0)
NOWHERE: tl.constexpr = tl.constexpr(2**31 - 1)


@triton.jit
def nothing_seen(BLOCK_M: tl.constexpr):
    """The sums over no keys."""
    noughts = tl.zeros((BLOCK_M,), tl.float32)
    infinite = noughts + float("inf")
    count, place = tl.zeros((BLOCK_M,), tl.int32), tl.full((BLOCK_M,), -1, tl.int32)
    sums = (-infinite, noughts, noughts, noughts, noughts)
    return sums + (count, noughts, noughts, infinite, place, -infinite, infinite, noughts)


@triton.jit
def shift_of(top):
    """What is subtracted from logits: the largest, 0 where there is none."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def referred(sums, top, STATISTICS: tl.constexpr):
    """(the sums relative to a `top` that is no smaller, what the output shrinks by)."""
    old, total, weighted, squares, cubes, count, deviation, spread, lowest, place, product_max, product_min, pivot = sums
    fresh = old == float("-inf")
    fall = tl.where(fresh, 0.0, old - shift_of(top))
    shrink = tl.where(fresh, 0.0, tl.exp(fall))
    if STATISTICS:
        weighted = shrink * (weighted + total * larger(fall, NO_WEIGHT))
        squares = shrink * shrink * squares
        cubes = shrink * shrink * shrink * cubes
    total = shrink * total
    return (
        top,
        total,
        weighted,
        squares,
        cubes,
        count,
        deviation,
        spread,
        lowest,
        place,
        product_max,
        product_min,
        pivot,
    ), shrink


@triton.jit
def added(a, b, STATISTICS: tl.constexpr):
    """The sums over the keys of both, which are relative to one `top`; the place is that of `a`."""
    top, total, weighted, squares, cubes, count, deviation, spread, lowest, place, product_max, product_min, pivot = a
    if STATISTICS:
        count_a, count_b = count.to(tl.float32), b[5].to(tl.float32)
        # About the pivot of the larger part: what the smaller one is moved by is rounded, and it may be a single key far off.
        old, pivot = pivot, tl.where(b[5] > count, b[12], pivot)
        deviation = tl.where(count == 0, 0.0, deviation + count_a * (old - pivot))
        other = tl.where(b[5] == 0, 0.0, b[6] + count_b * (b[12] - pivot))
        between = other / tl.maximum(count_b, 1.0) - deviation / tl.maximum(count_a, 1.0)
        spread = spread + b[7] + count_a * (count_b / tl.maximum(count_a + count_b, 1.0)) * between * between
        deviation = deviation + other
        weighted, squares, cubes = weighted + b[2], squares + b[3], cubes + b[4]
        count = count + b[5]
        lowest = smaller(lowest, b[8])
        product_min = smaller(product_min, b[11])
    product_max = larger(product_max, b[10])
    total = total + b[1]
    return (top, total, weighted, squares, cubes, count, deviation, spread, lowest, place, product_max, product_min, pivot)


@triton.jit
def place_of_larger(top, place, other_top, other_place):
    """The key with the largest logit of two sets of keys: the lower on a tie, the first that is not a number; −1 for none."""
    ahead = (other_top > top) | ((other_top == top) & (other_place < place)) | ((other_top != other_top) & (top == top))
    return tl.where((other_place >= 0) & ((place < 0) | ahead), other_place, place)


@triton.jit
def joined(a, b, STATISTICS: tl.constexpr):
    """(the sums over the keys of both, what the output of each shrinks by)."""
    top = larger(a[0], b[0])
    place = place_of_larger(a[0], a[9], b[0], b[9])
    a, shrink_a = referred(a, top, STATISTICS)
    b, shrink_b = referred(b, top, STATISTICS)
    both = added(a, b, STATISTICS)
    return both[:9] + (place,) + both[10:], shrink_a, shrink_b


@triton.jit
def top_of(factors, product_max, product_min, count):
    """The largest logit, by the extremes of the products, where a logit is product × factor; −∞ for no keys.

    Multiplication keeps the order, also in how it rounds. NaN at either end says that there is one among the logits.
    """
    above, below = factors * product_max, factors * product_min
    top = tl.where((above != above) | (below != below), float("nan"), tl.where(factors < 0.0, below, above))
    return tl.where(count == 0, float("-inf"), top)


@triton.jit
def lowest_of(factors, product_max, product_min, top, count):
    """The smallest logit, in the same way, NaN where the largest is; +∞ for no keys."""
    lowest = tl.where(factors < 0.0, factors * product_max, factors * product_min)
    return tl.where(count == 0, float("inf"), tl.where(top != top, float("nan"), lowest))


@triton.jit
def with_tile(
    sums,
    products,
    logits,
    seen,
    count,
    factors,
    first,
    columns,
    FULL: tl.constexpr,
    MASKED: tl.constexpr,
    STATISTICS: tl.constexpr,
    PLAIN: tl.constexpr,
    PIVOT: tl.constexpr,
):
    """(the sums with a tile taken in, its e^(z − top) [rows, keys], what the output shrinks by).

    The order is one of registers: what is visible is asked for early, and then told by the logits themselves.

    Args: `seen`, `count`: who is visible, and how many in a row, not looked at where the tile is FULL; `first`: the first key
    that position lets a row see; MASKED: there is a mask; PLAIN: a logit is product × factor, and no more; PIVOT: whether
    product_max is wanted without statistics.
    """
    product_max, product_min, lowest, place = sums[10], sums[11], sums[8], sums[9]
    if FULL:
        count = tl.zeros_like(sums[5]) + columns.shape[0]
    if STATISTICS or PIVOT:
        product_max = largest_of_row(products if FULL else tl.where(seen, products, float("-inf")))
    if STATISTICS:
        product_min = smallest_of_row(products if FULL else tl.where(seen, products, float("inf")))
        if not PLAIN:
            lowest = smallest_of_row(logits if FULL else tl.where(seen, logits, float("inf")))
    if not FULL:
        logits = tl.where(seen, logits, float("-inf"))
    if STATISTICS and PLAIN:
        top = top_of(factors, product_max, product_min, count)
        of_lowest = lowest_of(factors, product_max, product_min, top, count)
    else:
        top = largest_of_row(logits)
        of_lowest = lowest
    pivot, deviation, spread = sums[12], sums[6], sums[7]
    if STATISTICS:
        # Where no logit is larger than −∞ all that are hidden are found too: then the first key in reach is as good as any. Where
        # one is no number, it and +∞ are what is not less than +∞.
        found = (logits < tl.where(top == top, top, float("inf"))[:, None]) == 0
        if MASKED:
            found = found & seen
        place = tl.maximum(tl.min(tl.where(found, columns[None, :], NOWHERE), 1), first)
        place = place_of_larger(sums[0], sums[9], top, tl.where((count == 0) | (place == NOWHERE), -1, place))
        # Sums about the middle of the tile's logits, which is near enough to their mean that little cancels.
        middle = tl.where(count == 0, 0.0, 0.5 * top + 0.5 * of_lowest)
        from_pivot = logits - middle[:, None]
        if not FULL:
            from_pivot = tl.where(logits > float("-inf"), from_pivot, 0.0)
        deviation = tl.sum(from_pivot, 1)
        spread = tl.sum(from_pivot * from_pivot, 1)
        # A visible logit of −∞ was taken for hidden, and so was one that is no number.
        broken = (of_lowest == float("-inf")) | (of_lowest != of_lowest)
        deviation = tl.where(broken, float("nan"), deviation)
        divisor = tl.maximum(count, 1).to(tl.float32)
        spread = larger(spread - deviation * (deviation / divisor), 0.0)
        pivot = middle + deviation / divisor
        deviation = deviation - divisor * (pivot - middle)
    top = larger(sums[0], top)
    sums, shrink = referred(sums, top, STATISTICS)
    shifted = logits - shift_of(top)[:, None]
    weighted, squares, cubes = sums[2], sums[3], sums[4]
    if STATISTICS:
        shifted = larger(shifted, NO_WEIGHT)
        weights = tl.exp(shifted)
        squared = weights * weights
        weighted, squares, cubes = tl.sum(weights * shifted, 1), tl.sum(squared, 1), tl.sum(squared * weights, 1)
    else:
        weights = tl.exp(shifted)
    of_tile = (top, tl.sum(weights, 1), weighted, squares, cubes, count, deviation, spread)
    of_tile = of_tile + (lowest, place, product_max, product_min, pivot)
    sums = added(sums, of_tile, STATISTICS)
    if STATISTICS:
        sums = sums[:9] + (place,) + sums[10:]
    return sums, weights, shrink


@triton.jit
def with_sink(sums, sink, STATISTICS: tl.constexpr):
    """(the sums with a logit that takes weight and counts in nothing else, what the output shrinks by); last."""
    top = larger(sums[0], sink)
    sums, shrink = referred(sums, top, STATISTICS)
    shifted = larger(sink - shift_of(top), NO_WEIGHT)
    weight = tl.exp(shifted)
    total, weighted = sums[1] + weight, sums[2] + weight * shifted
    squares, cubes = sums[3] + weight * weight, sums[4] + weight * weight * weight
    return (top, total, weighted, squares, cubes) + sums[5:], shrink
