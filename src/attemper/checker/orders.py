"""Runs orders of operations on rows of an attention call, in narrow dtypes, and counts what does not survive.

What is computed: a product of float16 or bfloat16 operands is accumulated in float32 and rounded once, as matrix units do; every
other step is torch's own in that dtype. Each order is held against float64 on the same operands (rounded to the dtype first), so
that what shows is the order's own error. float8: q, k, v and the weights are rounded to it, saturating, products are float32,
and the comparison is with float64 on the operands as captured; where tensors are scaled to its range, the weights e^(z − max) are
too, by 2⁸ as in FlashAttention-3 (arXiv 2407.08608 and its code).
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attemper.capture import AttentionCall, Written
from attemper.checker.sampling import Sample, sample
from attemper.report.orders import COUNTS, OrderFigures
from attemper.stats import RowStats

NARROW = (torch.float16, torch.bfloat16)
FLOAT8 = tuple(getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name))

ALL_NARROW, EAGER, SCALE_FIRST, FUSED = "all-narrow", "eager", "scale-first", "fused"
UNSCALED, AMAX = "float8", "float8-amax"
WORDS = {
    ALL_NARROW: "product, scale and every step of the softmax in it",
    EAGER: "product, then scale, in it; softmax in float32",
    SCALE_FIRST: "scale on q, then product, in it; softmax in float32",
    FUSED: "product, scale and softmax in float32, weights rounded to it",
    UNSCALED: "q, k, v and weights rounded to it as they are",
    AMAX: "q, k, v rounded to it after scaling each tensor's largest number to its largest",
}


def own_order(written: Written | None, dtype: str) -> str:
    """The order that the model's code uses when it runs in 16 bits.

    Args:
        dtype: that the model was measured in.
    """
    model = getattr(torch, dtype)
    if written is None or torch.finfo(written.product).eps < torch.finfo(model).eps:
        return FUSED
    return SCALE_FIRST if written.scaled_first else EAGER


class Measured(NamedTuple):
    """What one call's orders gave, on its device.

    Attributes:
        orders: (dtype, order) in the order of the figures.
        figures: [orders, figures, heads], float64 where the device has it.
    """

    orders: tuple[tuple[str, str], ...]
    figures: Tensor


def run_orders(call: AttentionCall, rows: RowStats, counted: Tensor) -> Measured:
    """Run every order in every dtype.

    Args:
        rows: of the call, [batch, heads, queries]; counted: bool of the same shape, True for real rows with a visible key.
    """
    drawn = sample(call, rows, counted)
    names, figures = [], []
    for name, found in _all(drawn, call):
        names.append(name)
        figures.append(found)
    return Measured(tuple(names), torch.stack(figures))


def read_orders(measured: Measured) -> tuple[OrderFigures, ...]:
    """The figures on the CPU, one record for each order."""
    read = []
    for (dtype, order), values in zip(measured.orders, measured.figures.cpu().tolist(), strict=True):
        figures: dict[str, Any] = {
            name: tuple(int(each) if name in COUNTS else each for each in heads)
            for name, heads in zip(_NAMES, values, strict=True)
        }
        read.append(OrderFigures(dtype, order, **figures))
    return tuple(read)


class _Computed(NamedTuple):
    """What an order gave.

    Attributes:
        products, logits: as it writes them down; None where they are float32 all along.
        rounded: the weights as they meet v in the narrow dtype; weights: the same, with a sum of 1 but for rounding.
    """

    products: Tensor | None
    logits: Tensor | None
    rounded: Tensor
    weights: Tensor
    output: Tensor


def _all(drawn: Sample, call: AttentionCall) -> Iterator[tuple[tuple[str, str], Tensor]]:
    wide = torch.float32 if drawn.query.device.type == "mps" else torch.float64
    captured = (drawn.query, drawn.key, drawn.value)
    for dtype in NARROW:
        # An operand that overflows is counted, and left as it was in what the order is held against.
        narrow = [each.to(dtype) for each in captured]
        same = [torch.where(low.isfinite(), low.to(wide), high.to(wide)) for low, high in zip(narrow, captured, strict=True)]
        truth = _exact(drawn, same)
        lost = _by_head_of_operands(
            drawn, [~low.isfinite() & high.isfinite() for low, high in zip(narrow, captured, strict=True)]
        )
        product = _product(narrow[0].float(), narrow[1].float())
        for order, run in _ORDERS.items():
            computed = run(drawn, narrow, product, dtype)
            yield (_name(dtype), order), _figures(drawn, truth, computed, lost, dtype)
    if drawn.query.device.type == "mps":
        return
    truth = _exact(drawn, [each.to(wide) for each in captured])
    whole = [each.abs().amax().float().clamp(min=torch.finfo(torch.float32).tiny) for each in (call.query, call.key, call.value)]
    for dtype in FLOAT8:
        largest = torch.finfo(dtype).max
        ones = [torch.ones_like(each) for each in whole]
        for order, factors, weight in ((UNSCALED, ones, 1.0), (AMAX, [largest / each for each in whole], 256.0)):
            scaled = [each.float() * factor for each, factor in zip(captured, factors, strict=True)]
            lost = _by_head_of_operands(drawn, [each.abs() > largest * (1 + 1e-6) for each in scaled])
            back = [_rounded(each, dtype) / factor for each, factor in zip(scaled, factors, strict=True)]
            rounded = functools.partial(_rounded, dtype=dtype)
            computed = _online(drawn, _product(back[0], back[1]), back[2], rounded, weight)
            yield (_name(dtype), order), _figures(drawn, truth, computed, lost, dtype)


def _eager(drawn: Sample, narrow: list[Tensor], product: Tensor, dtype: torch.dtype) -> _Computed:
    written = product.to(dtype)
    logits = _logits(drawn, (written * drawn.scale).to(dtype))
    weights = _softmax(drawn, logits.float()).to(dtype)
    return _Computed(written, logits, weights, weights, _times(weights.float(), narrow[2].float()).to(dtype))


def _all_narrow(drawn: Sample, narrow: list[Tensor], product: Tensor, dtype: torch.dtype) -> _Computed:
    written = product.to(dtype)
    logits = _logits(drawn, (written * drawn.scale).to(dtype))
    sinks = None if drawn.sinks is None else drawn.sinks.to(dtype)
    top = logits.amax(-1, keepdim=True) if sinks is None else torch.maximum(logits.amax(-1, keepdim=True), sinks)
    powers = (logits - top).exp()
    total = powers.sum(-1, keepdim=True) if sinks is None else powers.sum(-1, keepdim=True) + (sinks - top).exp()
    weights = powers / total
    return _Computed(written, logits, weights, weights, _times(weights.float(), narrow[2].float()).to(dtype))


def _scale_first(drawn: Sample, narrow: list[Tensor], _product_of_raw: Tensor, dtype: torch.dtype) -> _Computed:
    scaled = (narrow[0] * drawn.scale).to(dtype)
    written = _product(scaled.float(), narrow[1].float()).to(dtype)
    logits = _logits(drawn, written)
    weights = _softmax(drawn, logits.float()).to(dtype)
    return _Computed(written, logits, weights, weights, _times(weights.float(), narrow[2].float()).to(dtype))


def _fused(drawn: Sample, narrow: list[Tensor], product: Tensor, dtype: torch.dtype) -> _Computed:
    computed = _online(drawn, product, narrow[2].float(), lambda each: each.to(dtype).float())
    return computed._replace(output=computed.output.to(dtype))


def _online(drawn: Sample, product: Tensor, value: Tensor, rounded: Callable[[Tensor], Tensor], factor: float = 1.0) -> _Computed:
    """As flash attention computes: factor · e^(z − max) is rounded before it meets v, the sum is not, and divides last."""
    logits = _logits(drawn, product * drawn.scale)
    top = logits.amax(-1, keepdim=True)
    top = top if drawn.sinks is None else torch.maximum(top, drawn.sinks.float())
    powers = (logits - top).exp()
    total = powers.sum(-1, keepdim=True)
    total = total if drawn.sinks is None else total + (drawn.sinks.float() - top).exp()
    low = rounded(powers * factor)
    return _Computed(None, None, low, low / (total * factor), _times(low, value) / (total * factor))


_ORDERS: dict[str, Callable[[Sample, list[Tensor], Tensor, torch.dtype], _Computed]] = {
    ALL_NARROW: _all_narrow,
    EAGER: _eager,
    SCALE_FIRST: _scale_first,
    FUSED: _fused,
}


class _Exact(NamedTuple):
    """float64: products, logits (−inf where nothing is visible), weights, output."""

    products: Tensor
    weights: Tensor
    output: Tensor


def _exact(drawn: Sample, operands: list[Tensor]) -> _Exact:
    products = _product(operands[0], operands[1])
    weights = _softmax(drawn, _logits(drawn, products * drawn.scale))
    return _Exact(products, weights, _times(weights, operands[2]))


def _logits(drawn: Sample, scaled: Tensor) -> Tensor:
    """Softcap, bias and mask, each in the dtype of the scaled product."""
    if drawn.softcap is not None:
        scaled = (scaled / drawn.softcap).tanh() * drawn.softcap
    if drawn.bias is not None:
        scaled = scaled + drawn.bias.to(scaled.dtype)
    return scaled.masked_fill(~drawn.visible, -torch.inf)


def _softmax(drawn: Sample, logits: Tensor) -> Tensor:
    if drawn.sinks is None:
        return logits.softmax(-1)
    sinks = drawn.sinks.to(logits.dtype).expand(*logits.shape[:-1], 1)
    return torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]


def _product(query: Tensor, key: Tensor) -> Tensor:
    """[sequences, kv_heads, group, rows, keys]."""
    return (query.flatten(2, 3) @ key.mT).unflatten(2, query.shape[2:4])


def _times(weights: Tensor, value: Tensor) -> Tensor:
    return (weights.flatten(2, 3) @ value).unflatten(2, weights.shape[2:4])


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """To float8 and back; what is too large saturates, as in the conversions of GPUs."""
    largest = torch.finfo(dtype).max
    return tensor.clamp(-largest, largest).to(dtype).float()


def _by_head_of_operands(drawn: Sample, lost: list[Tensor]) -> Tensor:
    """[kv_heads, group]: numbers of q, k and v that overflow in the cast."""
    group = drawn.query.shape[2]
    of_query = lost[0].sum((0, 3, 4))
    return of_query + sum(each.sum((0, 2, 3)).unsqueeze(-1).expand(-1, group) for each in lost[1:])


_NAMES = OrderFigures.FIGURES


def _figures(drawn: Sample, truth: _Exact, computed: _Computed, lost: Tensor, dtype: torch.dtype) -> Tensor:
    """[figures, heads], in the order of `OrderFigures.FIGURES`."""
    wide = truth.output.dtype
    sound = truth.output.isfinite().all(-1) & drawn.kept  # rows that were NaN before say nothing about an order
    seen = drawn.visible & sound.unsqueeze(-1)
    weights, output = computed.weights.to(wide), computed.output.to(wide)
    broken = sound & ~(weights.isfinite().all(-1) & output.isfinite().all(-1))
    fine = sound & ~broken
    zero = torch.zeros(drawn.query.shape[1:3], dtype=wide, device=output.device)

    def counted(mask: Tensor) -> Tensor:
        return mask.flatten(3).sum((0, 3)).to(wide)

    gone = seen & (computed.rounded == 0)
    tiny = torch.finfo(dtype).tiny
    moved = (weights - truth.weights).abs().masked_fill(~seen, 0.0).sum(-1) / 2
    moved = torch.where(broken, 1.0, torch.where(fine, moved, 0.0))
    error = torch.where(fine.unsqueeze(-1), output - truth.output, 0.0).square().sum((0, 3, 4))
    size = torch.where(fine.unsqueeze(-1), truth.output, 0.0).square().sum((0, 3, 4))
    relative = torch.where(error > 0, (error / size).sqrt(), 0.0)
    written, logits = computed.products, computed.logits
    figures = {
        "rows": counted(sound),
        "operand_overflows": lost.to(wide),
        "product_overflows": zero if written is None else counted(seen & ~written.isfinite()),
        "product_underflows": zero if written is None else counted(seen & (written == 0) & (truth.products != 0)),
        "logit_overflows": zero if logits is None else counted(seen & ~logits.isfinite()),
        "broken_rows": counted(broken),
        "subnormal_weights": counted(seen & (computed.rounded > 0) & (computed.rounded < tiny)),
        "lost_weight": torch.where(gone, truth.weights, 0.0).sum(-1).amax((0, 3)),
        "weight_error": moved.amax((0, 3)),
        "output_error": torch.where(counted(broken) > 0, torch.inf, relative),
    }
    return torch.stack([figures[name].flatten() for name in _NAMES])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
