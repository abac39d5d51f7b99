"""Why two calls part: their rules are compared first, which are known exactly, then what they were given."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attemper.checker.applying.applied import Applied
from attemper.checker.applying.logits import View
from attemper.checker.comparing.gaps import Allowance, Gaps
from attemper.checker.comparing.position import rotary_frequencies, turned
from attemper.checker.comparing.records import Parting
from attemper.checker.comparing.scaling import Scaled, name_scale, scaled_by, stated_factor
from attemper.checker.comparing.visibility import describe
from attemper.checker.comparing.weights import differing, relevant
from attemper.checker.load import Subject

# Two ways of writing a bias or a cap down agree to a few units of float32.
_SAME = 1e-5
_ROWS = 64  # enough of them to tell heads apart
_MOST_NAMES = 4


@dataclass(frozen=True)
class Side:
    """One of the two at the place where they part: the model, the call by the rule that it applied, and in float64."""

    subject: Subject
    applied: Applied
    view: View


@dataclass(frozen=True)
class Reason:
    """One difference: see `Parting`."""

    cause: str
    words: str
    heads: tuple[int, ...] = ()
    factor: float | None = None
    curve: tuple[float, ...] = ()
    parameters: tuple[str, ...] = ()


def explain(a: Side, b: Side, gaps: Gaps, allowed: Allowance, real: Tensor, padding: Tensor | None, row: int) -> Parting:
    """The parting at this pair of calls.

    Args:
        real: bool [batch, queries]; padding: bool [batch, keys] or None; row: index of the pair.
    """
    reasons = [*_rules(a, b, gaps, real, padding), *_given(a, b, gaps, allowed, real)]
    if not reasons:
        reasons = [Reason("unknown", "the outputs differ beyond rounding although q, k, v, scale and mask agree")]
    first = reasons[0]
    faults = [
        (name, side.applied) for name, side in (("A", a), ("B", b)) if side.applied.cause not in ("", "unknown", "nonfinite")
    ]
    told = [f"{name}'s implementation is at fault: {applied.words}" for name, applied in faults]
    words = [*told, first.words] if told else [first.words]
    beyond = (gaps.logits > allowed.logits) | (gaps.only_a > 0) | (gaps.only_b > 0)
    beyond = beyond if bool(beyond.any()) else (gaps.value > allowed.value) | (gaps.output > allowed.output)
    heads = first.heads or tuple(torch.nonzero(beyond).flatten().tolist())
    return Parting(
        row=row,
        heads=heads,
        cause=first.cause,
        factor=first.factor,
        explanation="; ".join(words),
        curve=first.curve,
        also=tuple(reason.words for reason in reasons[1:]),
        parameters=first.parameters,
    )


def _rules(a: Side, b: Side, gaps: Gaps, real: Tensor, padding: Tensor | None) -> Iterator[Reason]:
    """What the two do differently with the same q and k, the scale apart."""
    one, two = a.view, b.view
    for side in (a, b):
        if side.applied.cause in ("unknown", "nonfinite"):
            yield Reason(side.applied.cause, f"{side.subject.name} computes {side.applied.words}")
    apart = gaps.only_a + gaps.only_b
    if bool(apart.any()):
        heads = tuple(torch.nonzero(apart).flatten().tolist())
        yield Reason("mask", describe(one, two, real, padding), heads)
    if (one.sinks is None) != (two.sinks is None):
        yield Reason("sinks", f"only {'A' if two.sinks is None else 'B'} has sinks, a learned logit a head that takes weight")
    elif one.sinks is not None and two.sinks is not None and not torch.allclose(one.sinks, two.sinks, _SAME, 0.0):
        yield Reason("sinks", f"the sinks differ by up to {float((one.sinks - two.sinks).abs().max()):.4g}")
    widths = [(side.query.shape[-1], side.value.shape[-1]) for side in (one, two)]
    if widths[0] != widths[1]:
        (qk_a, v_a), (qk_b, v_b) = widths
        words = f"a head has {qk_a} numbers in q and k and {v_a} in v in A, {qk_b} and {v_b} in B"
        yield Reason("widths", words if v_a == v_b else f"{words}, so that their values and outputs cannot be subtracted")
    caps = (one.call.softcap, two.call.softcap)
    if caps[0] != caps[1]:
        words = [
            f"{name} {f'caps its logits at {cap:g}' if cap is not None else 'does not cap them'}"
            for name, cap in zip("AB", caps, strict=True)
        ]
        yield Reason("softcap", ", ".join(words))
    yield from _biases(one, two, real)


def _biases(a: View, b: View, real: Tensor) -> Iterator[Reason]:
    xx, xy, gap, size = 0.0, 0.0, 0.0, 0.0
    for rows in a.tiles():
        one, two = a.bias(rows), b.bias(rows)
        if one is None and two is None:
            return
        both = a.logits(rows).visible & b.logits(rows).visible & real[:, None, rows, None]
        x, y = (torch.where(both, 0.0 if bias is None else bias.double(), 0.0) for bias in (one, two))
        x, y = (torch.where(both, z - z.sum(-1, keepdim=True) / both.sum(-1, keepdim=True).clamp(min=1), 0.0) for z in (x, y))
        xx, xy = xx + float((x * x).sum()), xy + float((x * y).sum())
        gap, size = max(gap, float((x - y).abs().max())), max(size, float(x.abs().max()), float(y.abs().max()))
    if gap > _SAME * size:
        words = f"what is added to the logits differs by up to {gap:.4g}"
        if xx > 0:
            words += f"; B's is {xy / xx:.4g} times A's by least squares"
        else:
            words += ", and A adds nothing"
        yield Reason("bias", words)


def _given(a: Side, b: Side, gaps: Gaps, allowed: Allowance, real: Tensor) -> Iterator[Reason]:
    """What differs in s·q·k, then in v."""
    one, two = a.view, b.view
    if not bool(torch.isfinite(gaps.logits).all()):
        yield _named(a, b, Reason("nonfinite", "q or k holds NaN or infinity in one of them and not in the other"), gaps)
        return
    scaled = scaled_by(one, two, gaps, allowed, real)
    if scaled is not None:
        yield _scale(a, b, scaled, bool(((gaps.query > allowed.query) | (gaps.key > allowed.key)).any()))
    elif not _same_products(one, two, gaps, allowed, real):
        factor = stated_factor(one, two, real)
        if factor is not None:
            words = name_scale(a.subject, b.subject, one.call, two.call, Scaled((), factor))
            yield Reason("scale", f"by the scales of their calls {words}", factor=factor)
        yield _inputs(a, b, gaps, allowed, real)
    elif bool((gaps.value > allowed.value).any()):
        heads = tuple(torch.nonzero(gaps.value > allowed.value).flatten().tolist())
        yield _named(a, b, Reason("values", "the values differ, while the logits agree", heads), gaps)


def _scale(a: Side, b: Side, scaled: Scaled, carried: bool) -> Reason:
    words, names = name_scale(a.subject, b.subject, a.view.call, b.view.call, scaled), ()
    if carried:
        words += "" if scaled.share else "; q or k carries it"
        names = relevant(differing(a.subject.model, b.subject.model) or (), a.view.call.module)
        words += f": different weights in {_listed(names)}" if names else ""
    return Reason("scale", words, scaled.heads, scaled.factor, scaled.curve, names[:_MOST_NAMES])


def _same_products(a: View, b: View, gaps: Gaps, allowed: Allowance, real: Tensor) -> bool:
    """Whether the scaled products agree within the allowance, a row's common offset apart."""
    for rows in a.tiles():
        one, two = a.logits(rows), b.logits(rows)
        both = one.visible & two.visible & real[:, None, rows, None]
        apart = torch.where(both, two.scaled - one.scaled, 0.0)
        apart = torch.where(both, apart - apart.sum(-1, keepdim=True) / both.sum(-1, keepdim=True).clamp(min=1), 0.0)
        if bool((apart.abs().amax((0, 2, 3)) > allowed.logits).any()):
            return False
    return True


def _inputs(a: Side, b: Side, gaps: Gaps, allowed: Allowance, real: Tensor) -> Reason:
    """Why q·k differ although the rules agree."""
    one, two = a.view, b.view
    q_apart, k_apart = gaps.query > allowed.query, gaps.key > allowed.key
    permuted = _permuted(one, two, allowed, real, bool(q_apart.any()))
    if permuted is not None:
        return permuted
    whole = real.all(-1)
    whole = whole if bool(whole.any()) else torch.ones_like(whole)
    frequencies = [*rotary_frequencies(a.subject.model), *rotary_frequencies(b.subject.model)]
    for letter, x, y, room in (("q", one.query, two.query, allowed.query), ("k", one.key, two.key, allowed.key)):
        found = turned(x[whole], y[whole], float(room.max()), frequencies)
        if found is not None:
            return Reason("position", f"{letter} is turned otherwise by its position: {found.words}")
    heads = tuple(torch.nonzero(q_apart | k_apart).flatten().tolist())
    which = " and ".join(letter for letter, is_apart in (("q", q_apart), ("k", k_apart)) if bool(is_apart.any())) or "q·k"
    return _named(a, b, Reason("inputs", f"{which} {'differ' if ' and ' in which else 'differs'} already", heads), gaps)


def _permuted(a: View, b: View, allowed: Allowance, real: Tensor, q_apart: bool) -> Reason | None:
    """Heads in another order: all of them, or those of k alone where q agrees."""
    order = _order(a.key, b.key, allowed.key)
    if order is not None and not q_apart:
        return Reason("heads", f"the key heads are mapped otherwise: head h of B uses the keys of A's head {list(order)}[h]")
    rows = slice(0, min(_ROWS, a.shape[2]))
    one, two = a.logits(rows), b.logits(rows)
    both = (one.visible & two.visible).all(1, keepdim=True) & real[:, None, rows, None]
    order = _order(torch.where(both, one.scaled, 0.0), torch.where(both, two.scaled, 0.0), allowed.logits)
    if order is not None:
        return Reason("heads", f"the heads stand in another order: head h of B is A's head {list(order)}[h]")
    return None


def _order(a: Tensor, b: Tensor, allowed: Tensor) -> tuple[int, ...] | None:
    """For each head of b the head of a that equals it, if each has one and not all are in place."""
    if a.shape != b.shape:
        return None
    room = allowed.max()
    found, moved = [], False
    for head in range(b.shape[1]):
        equal = (a - b[:, head : head + 1]).abs().amax((0, 2, 3)) <= room
        if not bool(equal.any()):
            return None
        found.append(int(equal.int().argmax()))  # the first of several that share their keys
        moved = moved or not bool(equal[head])
    return tuple(found) if moved else None


def _named(a: Side, b: Side, reason: Reason, gaps: Gaps) -> Reason:
    """The reason with the parameters that are behind it, where they can be named."""
    names = differing(a.subject.model, b.subject.model)
    if names is None:
        return replace(reason, words=f"{reason.words}; the models' parameters bear other names, so which differ is not known")
    if not names:
        return replace(reason, words=f"{reason.words}; all parameters are equal, so it arises in the code before this call")
    near = relevant(names, a.view.call.module)
    cause = "weights" if reason.cause == "inputs" else reason.cause
    return replace(
        reason, cause=cause, words=f"{reason.words}: different weights in {_listed(near)}", parameters=near[:_MOST_NAMES]
    )


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names[:_MOST_NAMES]) + (f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else "")
