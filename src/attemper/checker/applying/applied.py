"""What a call really did, judged by its output: a backend may ignore the scale, the cap, the sinks or the mask that it is given.

The output that a record's rule gives in float64 is held against the call's own output, within a worst-case bound on rounding. If
it is beyond that, known ways of not doing what one is told are tried; the one that gives the output is taken for the rule.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attemper.capture import AttentionCall
from attemper.checker.applying.logits import View

_STEPS = 40
_CLOSE = 1e-12
_TF32 = 2.0**-11  # tensor cores keep 10 bits of each operand


@dataclass(frozen=True)
class Applied:
    """The rule that a call applied.

    Attributes:
        call: the record, with the rule that its output shows; cause: what was ignored, "" where it did as it was told, "unknown"
            where nothing that was tried gives the output; words: the same in words.
        excess: by how many times its output misses the bound under the rule that it was given.
    """

    call: AttentionCall
    cause: str = ""
    words: str = ""
    excess: float = 0.0


def applied(call: AttentionCall, real: Tensor, sample: slice | None = None) -> Applied:
    """The rule that the call's output shows; the stated one where the output is not known.

    Args:
        real: bool [batch, queries], the queries to judge by; sample: of these only some, side by side.
    """
    if call.output is None or not call.query.numel() or not call.key.numel():
        return Applied(call)
    excess = _excess(call, real, sample)
    if excess <= 1:
        return Applied(call)
    tried = [(found, cause, words, _excess(found, real, sample)) for found, cause, words in _alternatives(call, real, sample)]
    best = min(tried, key=lambda each: each[3], default=None)
    if best is None or best[3] > 1:
        if math.isinf(excess):
            return Applied(call, "nonfinite", _overflow(call, real, sample), excess)
        return Applied(call, "unknown", "an output that its own q, k, v, scale and mask do not give", excess)
    return Applied(best[0], best[1], best[2], excess)


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to nearest: 2^-24 for float32, 2^-11 for float16, 2^-8 for bfloat16."""
    return torch.finfo(dtype).eps / 2


def output_bound(view: View, real: Tensor) -> Tensor:
    """How far rounding can take the output of a call from its definition, the largest over its real rows, [heads]."""
    largest = view.query.new_zeros(view.shape[1])
    for rows in view.tiles():
        _, bound = _output(view, rows)
        largest = torch.maximum(
            largest, torch.where(real[:, None, rows, None], bound, 0.0).nan_to_num(0.0, torch.inf).amax((0, 2, 3))
        )
    return largest


def _output(view: View, rows: slice) -> tuple[Tensor, Tensor]:
    """The output in float64, and the worst case of rounding it: [batch, heads, rows, d_v].

    Products and sums accumulate in float32 or better, q·scale, the logits, the weights and the output are rounded to the dtype
    once each: |Δz| ≤ (d·u32 + 3u)·|s|Σ|q||k| + 2u|z|, Δp/p ≤ e^(2Δz) − 1 + 2n·u32 + 4u, and the last rounding.
    """
    dtype = view.call.query.dtype
    roundoff, sums = unit_roundoff(dtype), min(unit_roundoff(torch.float32), unit_roundoff(dtype))
    if view.query.is_cuda and torch.get_float32_matmul_precision() != "highest":
        roundoff = max(roundoff, _TF32)
    width, keys = view.query.shape[-1], view.shape[3]
    tile = view.logits(rows)
    weights = view.weights(tile.logits, tile.visible)
    output = weights @ view.value
    of_logits = (width * sums + 3 * roundoff) * view.magnitude(rows) + 2 * roundoff * tile.logits.abs()
    of_logits = torch.where(tile.visible, of_logits, 0.0).amax(-1, keepdim=True)
    relative = torch.expm1(2 * of_logits) + 2 * keys * sums + 4 * roundoff
    return output, (weights @ view.value.abs()) * relative + roundoff * output.abs()


def _excess(call: AttentionCall, real: Tensor, sample: slice | None) -> float:
    """Largest error of the output as a multiple of its bound; infinite where it is not finite and should be."""
    assert call.output is not None
    view, worst = View(call, sample), 0.0
    for rows in view.tiles():
        output, bound = _output(view, rows)
        seen = view.logits(rows).visible.any(-1, keepdim=True)  # rows that see nothing: backends differ, and nobody reads them
        own = call.output[..., rows, :].double()
        # Of q, k or v that are not finite themselves nothing follows: PyTorch's kernel for AVX-512 answers a NaN in q with 0.
        error = torch.where(torch.isfinite(output), (own - output).abs(), 0.0)
        ratio = error / bound.clamp_min(torch.finfo(torch.float64).tiny)
        ratio = torch.where(seen & real[:, None, rows, None] & (error != 0), ratio.nan_to_num(torch.inf, torch.inf), 0.0)
        worst = max(worst, float(ratio.max())) if ratio.numel() else worst
    return worst


def _alternatives(call: AttentionCall, real: Tensor, sample: slice | None) -> Iterator[tuple[AttentionCall, str, str]]:
    """Calls that ignore one thing each: (call, cause, words)."""
    queries, keys = call.query.shape[-2], call.key.shape[-2]
    if call.softcap is not None:
        yield replace(call, softcap=None), "softcap", f"it ignores its softcap of {call.softcap:g}"
    if call.sinks is not None:
        yield replace(call, sinks=None), "sinks", "it ignores its sinks"
    if call.attn_mask is not None or call.is_causal or call.window is not None:
        bare = replace(call, attn_mask=None, is_causal=False, window=None)
        ignored = "it ignores its mask"
        if call.attn_mask is None and call.seam == "huggingface":
            ignored = "it is given no mask and applies no causal rule itself (is a mask function registered for it?)"
        yield bare, "mask", ignored
        yield replace(bare, is_causal=True, offset=0), "mask", "it puts the causal rule (top-left) in place of its mask"
        if queries != keys:
            right = replace(bare, is_causal=True, offset=keys - queries)
            yield right, "mask", "it puts the causal rule (bottom-right) in place of its mask"
            yield replace(call, offset=0), "mask", "it aligns the causal rule top-left"
            yield replace(call, offset=keys - queries), "mask", "it aligns the causal rule bottom-right"
    else:
        yield replace(call, is_causal=True), "mask", "it is causal, unasked"
    if call.attn_mask is not None and call.attn_mask.is_floating_point() and not isinstance(call.scale, Tensor):
        hidden = call.attn_mask <= torch.finfo(call.attn_mask.dtype).min / 2
        scaled = torch.where(hidden, call.attn_mask, call.attn_mask * call.scale)
        yield replace(call, attn_mask=scaled), "bias", "it multiplies its float mask by the scale too"
    heads, kv_heads = call.query.shape[1], call.key.shape[1]
    if 1 < kv_heads < heads:
        order = torch.arange(heads) % kv_heads
        mapped = replace(call, key=call.key[:, order], value=call.value[:, order])
        yield mapped, "heads", "it repeats the key and value heads in the order 0 1 0 1, not 0 0 1 1"
    found = _fitted_scale(call, real, sample)
    if found is not None:
        yield replace(call, scale=found), "scale", "it does not apply the scale that it is given"


def _overflow(call: AttentionCall, real: Tensor, sample: slice | None) -> str:
    view, largest = View(replace(call, scale=1.0, softcap=None), sample), 0.0
    for rows in view.tiles():
        largest = max(largest, float(torch.where(real[:, None, rows, None], view.logits(rows).scaled, 0.0).abs().max()))
    name, most = str(call.query.dtype).removeprefix("torch."), torch.finfo(call.query.dtype).max
    words = "NaN or infinity from q, k and v"
    if largest > most:
        return f"{words} whose largest |q·k|, {largest:.5g}, is beyond {name}'s {most:.5g}"
    return f"{words} in {name}; the largest |q·k| is {largest:.5g}"


def _fitted_scale(call: AttentionCall, real: Tensor, sample: slice | None) -> Tensor | None:
    """The scale of each head that gives the output best, by Gauss-Newton from several starts: [heads], float64."""
    view = View(call, sample)
    if bool((view.scale == 0).any()):
        return None
    width, stated = view.query.shape[-1], view.scale.mean((0, 2)).expand(view.shape[1])
    starts = (
        stated * stated,
        torch.ones_like(stated),
        stated / width**0.5,
        stated * width**0.5,
        stated * 0 + width**-0.5,
        stated,
    )
    best, factor = torch.full_like(stated, torch.inf), torch.ones_like(stated)
    for start in starts:
        squares, _ = _fit(view, real, start / stated)
        factor, best = torch.where(squares < best, start / stated, factor), torch.minimum(squares, best)
    for _ in range(_STEPS):
        _, step = _fit(view, real, factor)
        shrink, squares = torch.ones_like(step), best
        for _ in range(6):  # halve the step of those heads that it makes worse
            squares, _ = _fit(view, real, factor + shrink * step)
            shrink = torch.where(squares <= best, shrink, shrink / 2)
        better = squares <= best
        factor, best = torch.where(better, factor + shrink * step, factor), torch.minimum(squares, best)
        if bool((step.abs() <= _CLOSE * factor.abs()).all()) or not bool(better.any()):
            break
    scale = view.scale * factor.view(1, -1, 1)
    uniform = scale.mean()
    if bool(((scale - uniform).abs() <= 1e-6 * uniform.abs()).all()):
        return uniform  # one number for all heads
    return scale


def _fit(view: View, real: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """(Σ residual², Gauss-Newton step of the factor), [heads] each, on the scale multiplied by `factor`."""
    assert view.call.output is not None
    squares, slope, curvature = torch.zeros_like(factor), torch.zeros_like(factor), torch.zeros_like(factor)
    cap = view.call.softcap
    for rows in view.tiles():
        tile = view.logits(rows)
        scaled = tile.scaled * factor.view(1, -1, 1, 1)
        capped = scaled if cap is None else cap * torch.tanh(scaled / cap)
        bias = view.bias(rows)
        weights = view.weights(capped if bias is None else capped + bias, tile.visible)
        change = tile.scaled if cap is None else tile.scaled * (1 - (capped / cap).square())
        output = weights @ view.value
        lean = (weights * change) @ view.value - (weights * change).sum(-1, keepdim=True) * output
        counted = real[:, None, rows, None] & tile.visible.any(-1, keepdim=True)
        residual = torch.where(counted, view.call.output[..., rows, :].double() - output, 0.0)
        lean = torch.where(counted, lean, 0.0)
        squares = squares + residual.square().sum((0, 2, 3))
        slope = slope + (residual * lean).sum((0, 2, 3))
        curvature = curvature + lean.square().sum((0, 2, 3))
    return squares, slope / curvature.clamp_min(torch.finfo(torch.float64).tiny)
