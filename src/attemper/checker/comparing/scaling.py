"""Whether a factor explains the difference of two calls' s·q·k, whichever of scale, q and k carries it, and what to call it."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attemper.capture import AttentionCall
from attemper.checker.applying.logits import View
from attemper.checker.comparing.gaps import Allowance, Gaps
from attemper.checker.load import Subject
from attemper.checker.scale import judged
from attemper.checker.scale_measured import measure_call
from attemper.checker.thresholds import Thresholds

_SAME = 1e-5
_NAMED = 1e-3


@dataclass(frozen=True)
class Scaled:
    """B's s·u = factor · A's s·u.

    Attributes:
        heads: those whose factor is not 1; factor: of all of these, or None where it differs among them or by position.
        factors: head by head; curve: by query position, () where it is the same for all.
        share: dimensions of q and k that carry the factor, where it is a part of them; ().
    """

    heads: tuple[int, ...]
    factor: float | None
    factors: tuple[float, ...] = ()
    curve: tuple[float, ...] = ()
    share: tuple[int, int] | None = None


def scaled_by(a: View, b: View, gaps: Gaps, allowed: Allowance, real: Tensor) -> Scaled | None:
    """The factor, where one explains the products to within the allowance and is not 1; else None."""
    stated = _stated(a, b)
    by_head = gaps.factor.nan_to_num(1.0)
    within = _explains(a, b, by_head.view(-1, 1), allowed, real)
    if stated is not None and within:
        by_head = stated  # q and k agree: the ratio of the two scales is the factor, exactly
    if within:
        off = (by_head - 1).abs() > (_SAME if stated is not None else _noise(gaps, allowed))
        heads = tuple(torch.nonzero(off).flatten().tolist())
        if not heads:
            return None
        some = by_head[list(heads)]
        one = bool(((some - some.mean()).abs() <= _NAMED * some.mean().abs()).all())
        return Scaled(heads, float(some.mean()) if one else None, tuple(by_head.tolist()))
    by_row = (gaps.products / gaps.squares).nan_to_num(1.0)
    if _explains(a, b, by_row, allowed, real) and bool(((by_row - 1).abs() > _noise(gaps, allowed).unsqueeze(-1)).any()):
        curve = (gaps.products.sum(0) / gaps.squares.sum(0)).nan_to_num(1.0)
        heads = tuple(torch.nonzero(((by_row - 1).abs() > _SAME).any(-1)).flatten().tolist())
        return Scaled(heads, None, tuple(by_head.tolist()), tuple(curve.tolist()))
    return _in_part(a, b, gaps, allowed, real)


def stated_factor(a: View, b: View, real: Tensor) -> float | None:
    """The ratio of the two calls' scales where q and k differ and no factor explains that; None if it is 1, not one number, or
    taken back by the size of q and k.
    """
    if a.scale.numel() != 1 or b.scale.numel() != 1 or bool((a.scale == 0).any()):
        return None
    factor = float(b.scale / a.scale)
    sizes = [
        float(torch.where(real[:, None, :, None], view.query, 0.0).square().mean() * view.key.square().mean()) for view in (a, b)
    ]
    if abs(factor - 1) <= _SAME or factor <= 0 or min(sizes) <= 0:
        return None
    carried = 0.5 * math.log(sizes[1] / sizes[0])
    return factor if abs(math.log(factor) + carried) > 0.5 * abs(math.log(factor)) else None


def name_scale(a: Subject, b: Subject, call_a: AttentionCall, call_b: AttentionCall, scaled: Scaled) -> str:
    """The factor in words, with the likely mistake."""
    if scaled.curve:
        curve = scaled.curve
        return (
            f"the factor on q·k depends on the position: B's is {curve[0]:.5g} times A's at the first query, "
            f"{curve[len(curve) // 2]:.5g} in the middle, {curve[-1]:.5g} at the last"
        )
    if scaled.factor is None:
        listed = ", ".join(f"{head}: {scaled.factors[head]:.5g}" for head in scaled.heads[:8])
        return f"each head's logits are multiplied by a factor of its own (head: factor) {listed}"
    words = f"B multiplies q·k by {scaled.factor:.6g} times what A does"
    if scaled.share is not None:
        first, last = scaled.share
        return f"{words}, in dimensions {first} to {last} of {call_a.query.shape[-1]} alone: a factor on that part of q or k"
    causes = {name: _causes(side, call) for name, side, call in (("A", a, call_a), ("B", b, call_b))}
    if causes["A"] != causes["B"]:  # what is odd about both alike is not what tells them apart
        said = [f"{name}'s scale: {cause}" for name, those in causes.items() for cause in those]
        return f"{words} ({'; '.join(said)})"
    known = _known(scaled.factor, call_a)
    return f"{words} ({known})" if known else words


def _causes(side: Subject, call: AttentionCall) -> tuple[str, ...]:
    """What `check` would say of the scale of this call, once."""
    said = {verdict.cause for _, verdict, _ in judged(side.model, side.config, call.module, measure_call(call), Thresholds())}
    return tuple(sorted(said))


def _known(factor: float, call: AttentionCall) -> str:
    width = call.query.shape[-1]
    scale = call.scale if not isinstance(call.scale, Tensor) else float(call.scale.mean())
    named = {
        "its scale is applied a second time": scale,
        "1/sqrt(d_head) is applied a second time": width**-0.5,
        "1/sqrt(d_head) is missing": width**0.5,
        "the scale is missing": 1 / scale if scale else math.inf,
        "1/d_head once more": 1 / width,
        "d_head": float(width),
    }
    for dtype in (torch.bfloat16, torch.float16):
        named[f"the scale was rounded to {str(dtype).removeprefix('torch.')}"] = (
            torch.tensor(scale, dtype=dtype).item() / scale if scale else math.inf
        )
    close = {words: abs(value / factor - 1) for words, value in named.items() if value and math.isfinite(value) and value != 1}
    tolerance = _NAMED if abs(factor - 1) > 10 * _NAMED else _SAME
    best = min(close, key=lambda words: close[words], default=None)
    return best if best is not None and close[best] <= tolerance else ""


def _stated(a: View, b: View) -> Tensor | None:
    """The ratio of the scales that the calls apply, [heads], if q and k are equal; None otherwise or where it varies."""
    if not (torch.equal(a.query, b.query) and torch.equal(a.key, b.key)):
        return None
    ratio = (b.scale / a.scale).expand(1, a.shape[1], -1) if a.scale.shape[0] == b.scale.shape[0] == 1 else None
    if ratio is None or not bool((ratio == ratio[..., :1]).all()):
        return None
    return ratio[0, :, 0]


def _noise(gaps: Gaps, allowed: Allowance) -> Tensor:
    """How far rounding alone may take a head's factor from 1: by Cauchy-Schwarz, the allowance over their RMS, [heads]."""
    rms = (gaps.squares.sum(-1) / gaps.pairs.clamp(min=1)).sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    return (allowed.logits / rms).clamp_min(_SAME)


def _explains(a: View, b: View, factor: Tensor, allowed: Allowance, real: Tensor) -> bool:
    """Whether B's s·u − factor · A's s·u is within the allowance everywhere; factor: [heads, 1 or queries]."""
    room = allowed.logits * torch.maximum(factor.abs().amax(-1), torch.ones_like(allowed.logits))
    for rows in a.tiles():
        one, two = a.logits(rows), b.logits(rows)
        by = (factor if factor.shape[-1] == 1 else factor[:, rows]).unsqueeze(-1)
        both = one.visible & two.visible & real[:, None, rows, None]
        rest = torch.where(both, two.scaled - by * one.scaled, 0.0).abs().amax((0, 2, 3))
        if not bool((rest <= room).all()):
            return False
    return True


def _in_part(a: View, b: View, gaps: Gaps, allowed: Allowance, real: Tensor) -> Scaled | None:
    """One factor on some neighbouring dimensions of q and k, as YaRN's on the rotated ones."""
    if a.query.shape != b.query.shape or a.key.shape != b.key.shape:
        return None
    seen = torch.ones_like(real) if a.key.shape[-2] != real.shape[-1] else real
    factors = []
    for one, two, counted, room in (
        (a.query, b.query, real, allowed.query),
        (a.key, b.key, seen, allowed.key),
    ):
        one, two = (torch.where(counted[:, None, :, None], x, 0.0) for x in (one, two))
        by = (one * two).sum((0, 1, 2)) / one.square().sum((0, 1, 2))
        if bool(((two - by * one).abs() > 2 * room.max()).any()):
            return None
        factors.append(by)
    by = (factors[0] * factors[1]).nan_to_num(1.0)
    moved = torch.nonzero((by - 1).abs() > _NAMED).flatten()
    if not len(moved) or len(moved) == len(by) or int(moved[-1] - moved[0]) + 1 != len(moved):
        return None
    some = by[moved]
    if bool(((some - some.mean()).abs() > _NAMED * some.mean().abs()).any()):
        return None
    return Scaled(tuple(range(a.shape[1])), float(some.mean()), (), (), (int(moved[0]), int(moved[-1])))
