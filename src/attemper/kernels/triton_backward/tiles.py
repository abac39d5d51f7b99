"""A tile of weights again, and what flows through it: from the gradient of the weights to that of the logits and the products.

What it must hold:
- the logits are formed as the forward pass forms them, and the maximum goes before anything is multiplied in;
- terms of rows come in a shape that broadcasts to the tile: [rows, 1] for one of [rows, keys], [1, rows] for one of [keys, rows].
"""

import triton
import triton.language as tl

from attemper.kernels.triton_common import NO_MASK, in_reach, masked, offsets_of, product, tanh


@triton.jit
def load_terms(scale, figures, entropy, constant, d_entropy, batch, head, row, inside, plane, figure_stride, queries,
               scale_batch, scale_head, scale_row):  # fmt: skip
    """What the tiles of a block want of its rows, [rows] each: factor, shift, peak, surprise, constant, d_entropy.

    The weight of a key is e^(z − shift) · peak, and ln p + H is (z − shift) + surprise: the two large parts of a logarithm never
    meet. Rows that are not `inside` weigh nothing. d_entropy is 0 where there is none.
    """
    places = plane * queries + row
    factor = tl.load(scale + offsets_of(batch, head, row, scale_batch, scale_head, scale_row), mask=inside, other=0.0)
    shift = tl.load(figures + places, mask=inside, other=0.0)
    log_total = tl.load(figures + figure_stride + places, mask=inside, other=0.0)
    peak = tl.where(inside, tl.exp(-log_total), 0.0)
    of_constant = tl.load(constant + places, mask=inside, other=0.0)
    if d_entropy is not None:
        # The forward pass without statistics has no entropy to tell, and the gradient that flows into it is then nought.
        of_rows = tl.load(entropy + places, mask=inside, other=0.0)
        surprise = tl.where(of_rows == of_rows, of_rows, 0.0) - log_total
        of_entropy = tl.load(d_entropy + places, mask=inside, other=0.0)
    else:
        surprise = shift * 0.0
        of_entropy = surprise
    return factor, shift, peak, surprise, of_constant, of_entropy


@triton.jit
def load_of_lse(d_lse, constant, places, inside):
    """What flows into the lse of rows, 0 where nothing does: loaded where it is wanted, for want of registers to keep it in."""
    return tl.zeros_like(constant) if d_lse is None else tl.load(d_lse + places, mask=inside, other=0.0)


@triton.jit
def bias_and_seen(first, end, columns, mask, mask_offsets, mask_column, mask_limit, LEFT: tl.constexpr, MASK: tl.constexpr):
    """(what a float mask adds to the logits, of no meaning without one; who is visible), [rows, keys]."""
    seen = in_reach(columns, first, end, LEFT)
    bias = tl.zeros((1, 1), tl.float32)
    if MASK != NO_MASK:
        bias, seen = masked(bias, seen, mask, mask_offsets, columns, mask_column, mask_limit, MASK)
    return bias, seen


@triton.jit
def weights_again(products, factor, shift, peak, softcap, inverse_softcap, bias, SOFTCAP: tl.constexpr, BIASED: tl.constexpr):
    """(weights before dropout, z − shift, slope of the logit as a function of factor · product)"""
    logits = products * factor
    slope = 1.0
    if SOFTCAP:
        bent = tanh(logits * inverse_softcap)
        logits = softcap * bent
        slope = (1.0 - bent) * (1.0 + bent)
    if BIASED:
        logits += bias
    shifted = logits - shift
    return tl.exp(shifted) * peak, shifted, slope


@triton.jit
def holds_all(weights, peak, constant):
    """Bool, in the shape of the weights: whose weight is 1, the rest of the row weighing less than a rounding of it.

    In no row of which something is not finite: there it has to show.
    """
    return weights > tl.where((peak == 1.0) & (tl.abs(constant) < float("inf")), 0.5, 2.0)


@triton.jit
def logit_gradients(weights, peak, shifted, into, constant, d_lse, d_entropy, surprise, ENTROPY: tl.constexpr):
    """dz = p·(dp + constant − g·(ln p + H)); `into` is dp, dropout applied, and constant is g_lse − D.

    Of a key that holds all the weight, as a row's only one does, dp is D. They are sums in two orders, whose difference would
    be all rounding.
    """
    into = tl.where(holds_all(weights, peak, constant), d_lse, into + constant)
    if ENTROPY:
        # Without weight nothing flows, though ln p is −∞.
        into -= d_entropy * tl.where(weights == 0.0, 0.0, shifted + surprise)
    return weights * into


@triton.jit
def spoilt(seen, values):
    """[m, width] of [m, n] and [n, width]: NaN where something that is not finite is seen, else 0."""
    broken = tl.where(values - values == 0.0, 0.0, 1.0).to(values.dtype)
    return tl.where(product(seen.to(values.dtype), broken) > 0.0, float("nan"), 0.0)


@triton.jit
def cleaned(values):
    """The values with 0 for what is not finite."""
    return tl.where(values - values == 0.0, values, 0.0).to(values.dtype)


@triton.jit
def holds_nan(values):
    """Bool [rows] of [rows, width]."""
    return tl.max((values != values).to(tl.int32), 1) > 0
