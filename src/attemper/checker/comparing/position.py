"""Tells rotary position embeddings apart that turn q and k differently: other frequencies, another pairing, shifted positions.

A rotation keeps the length of each pair of dimensions that it turns. So where every pair keeps its length from A to B, the angle
between the two is what B's rotation has more than A's; it grows with the position by the difference of the frequencies. Where
only the whole keeps its length, the pairs themselves may be others: dimensions i and i + d/2 (half-split), or 2i and 2i + 1.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_PAIRINGS = ("half-split", "interleaved")


@dataclass(frozen=True)
class Turned:
    """How B's rotation differs, in words; base: (A's, B's) base of the frequencies, where both follow from one."""

    words: str
    base: tuple[float, float] | None = None


def turned(a: Tensor, b: Tensor, tolerance: float, frequencies: list[Tensor]) -> Turned | None:
    """What kind of rotation leads from A's q (or k) to B's; None where none does.

    Args:
        a, b: [batch, heads, positions, d] in float64; tolerance: what rounding explains of an element.
        frequencies: of the models' rotary embeddings, A's first, [pairs] each.
    """
    if a.shape != b.shape or a.shape[-2] < 3:
        return None
    room = tolerance * a.shape[-1] ** 0.5
    if bool(((a.norm(dim=-1) - b.norm(dim=-1)).abs() > room).any()) or bool(((a - b).abs() <= tolerance).all()):
        return None
    for pairing in _PAIRINGS:
        for span in _spans(a, frequencies):
            one, two = _pairs(a[..., span], pairing), _pairs(b[..., span], pairing)
            rest = torch.ones(a.shape[-1], dtype=torch.bool)
            rest[span] = False
            untouched = bool(((a[..., rest] - b[..., rest]).abs() <= tolerance).all())
            if untouched and bool(((one.abs() - two.abs()).abs() <= 2 * tolerance).all()):
                found = _by_angle(one, two, room, pairing, frequencies)
                if found is not None:
                    return found
    return _by_pairing(a, b, room, frequencies)


def rotary_frequencies(model: nn.Module) -> list[Tensor]:
    """The distinct frequency tables among a model's buffers, [pairs] each."""
    tables: list[Tensor] = []
    for name, buffer in model.named_buffers():
        table = buffer.detach().double().cpu()
        if name.endswith("inv_freq") and buffer.ndim == 1 and not any(torch.equal(table, each) for each in tables):
            tables.append(table)
    return tables


def _by_angle(one: Tensor, two: Tensor, room: float, pairing: str, frequencies: list[Tensor]) -> Turned | None:
    """Every pair kept its length: read the angles off, [positions, pairs], and how they grow."""
    turn = (two * one.conj()).sum((0, 1))
    whole = (one.abs() * two.abs()).sum((0, 1))
    turn = turn / whole.clamp_min(torch.finfo(torch.float64).tiny)
    if bool(((two - one * turn).abs() > 4 * room).any()):
        return None  # heads or sequences turn differently: no rule of positions
    growth = (turn[1:] * turn[:-1].conj()).mean(0).angle()
    drift = (turn[1:] * turn[:-1].conj() * torch.polar(torch.ones_like(growth), -growth)).angle().abs()
    weight = one.abs().amax((0, 1))
    if bool((drift * weight[1:] > 8 * room).any()):
        return Turned(f"the positions that {pairing} pairs of dimensions are turned by differ, unevenly from token to token")
    constant = turn[0].angle()
    if bool((growth.abs() * (len(turn) - 1) * weight.amax(0) <= 8 * room).all()):
        return Turned(f"{pairing} pairs are turned by a constant angle more ({_some(constant)} radians): positions are shifted")
    words = f"{pairing} pairs of dimensions turn by other angles per position in B: {_some(growth)} radians more"
    bases = _bases(growth, frequencies)
    if bases is not None:
        words = f"the rotary base (rope_theta) is {bases[0]:.6g} in A and {bases[1]:.6g} in B"
    return Turned(words, bases)


def _by_pairing(a: Tensor, b: Tensor, room: float, frequencies: list[Tensor]) -> Turned | None:
    positions = torch.arange(a.shape[-2], dtype=torch.float64, device=a.device)
    for table in frequencies:
        angle = torch.outer(positions, table.to(a.device))
        for before, after in (_PAIRINGS, _PAIRINGS[::-1]):
            for span in _spans(a, [table]):
                if span.stop - span.start != 2 * len(table):
                    continue
                plain = _unpaired(_pairs(a[..., span], before) * torch.polar(torch.ones_like(angle), -angle), before)
                again = _unpaired(_pairs(plain, after) * torch.polar(torch.ones_like(angle), angle), after)
                if bool(((again - b[..., span]).abs() <= 8 * room).all()):
                    return Turned(f"rotary pairs are {before} in A and {after} in B")
    first = bool(((a[..., 0, :] - b[..., 0, :]).abs() <= room).all())
    if first:
        return Turned("q or k agree at the first position and have the same lengths, but other directions, at later ones")
    return None


def _bases(growth: Tensor, frequencies: list[Tensor]) -> tuple[float, float] | None:
    """(A's base, B's) if both tables are base^(−i/pairs)."""
    pairs = len(growth)
    exponent = -torch.arange(pairs, dtype=torch.float64) / pairs
    for table in frequencies:
        if len(table) != pairs or pairs < 2:
            continue
        base_a = float(table[1] ** (1 / exponent[1]))
        two = table + growth.cpu()
        if bool((two[1:] <= 0).any()):
            continue
        base_b = float(two[1] ** (1 / exponent[1]))
        fits = [((base**exponent - each).abs() <= 1e-5).all() for base, each in ((base_a, table), (base_b, two))]
        if all(map(bool, fits)):
            return base_a, base_b
    return None


def _spans(a: Tensor, frequencies: list[Tensor]) -> Iterator[slice]:
    """Where the turned dimensions may lie: everywhere, first or last."""
    width = a.shape[-1]
    lengths = {2 * len(table) for table in frequencies} | {width}
    for length in sorted(lengths, reverse=True):
        if 2 <= length <= width and length % 2 == 0:
            yield slice(0, length)
            if length < width:
                yield slice(width - length, width)


def _pairs(x: Tensor, pairing: str) -> Tensor:
    """Each pair of dimensions as one complex number."""
    if pairing == "half-split":
        first, second = x.chunk(2, -1)
        return torch.complex(first.contiguous(), second.contiguous())
    return torch.complex(x[..., 0::2].contiguous(), x[..., 1::2].contiguous())


def _unpaired(z: Tensor, pairing: str) -> Tensor:
    parts = (z.real, z.imag)
    return torch.cat(parts, -1) if pairing == "half-split" else torch.stack(parts, -1).flatten(-2)


def _some(values: Tensor) -> str:
    listed = [f"{value:.4g}" for value in values[:4].tolist()]
    return ", ".join(listed) + (", …" if len(values) > 4 else "")
