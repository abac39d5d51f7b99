"""Follows q and k back to their projections, to tell by how much they were scaled on the way.

A model may scale q before the call (Whisper, OPT), scale q and k each (LightGlue), or normalise them (Gemma 3): the factor
that the call applies is then not the whole scale. While a module runs, the outputs of the Linear-like and norm modules that it
owns are kept; at the call only their norms over each group of d numbers stay, d times smaller, and the outputs are let go.

Norms are compared because rotary embeddings keep them, in every pairing of dimensions and where they rotate a part only. So
the factor is measured, not read from an attribute: q's norms over the projection's are one number for all tokens and heads, or
one for each token where the model scales by position. Where RoPE turns a part of the width and is stretched, that part has a
factor of its own: both parts are then measured by themselves.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from attemper.capture.ratios import SAMPLES, constant_ratio, ratio_by_position, splits

_LINEAR = re.compile(r"(Linear(\d+bit\w*)?|^Conv1D)$")  # nn.Linear, wrapped, quantised and parallel ones, GPT-2's Conv1D
_NORM = re.compile(r"Norm")
_FEED_FORWARD = re.compile(r"mlp|feedforward|ffn|expert|moe|router|intermediate", re.IGNORECASE)


class _Found(NamedTuple):
    factor: float | None
    change: str
    curve: Tensor | None = None


@dataclass(frozen=True)
class Candidate:
    """What q or k may have been made of: norms over each d neighbouring numbers of an output, [batch, tokens, groups]."""

    kind: str
    norms: Tensor


@dataclass(frozen=True)
class Origin:
    """How one operand of an attention call relates to the projection it came from.

    Attributes:
        norms: of the operand, [batch, tokens, heads]; None where it is the projection by construction.
        candidates: the outputs it may have come from, nearest first.
        tolerance: largest relative spread of a ratio that still counts as constant.
        layouts: heads of q and of k, by which fused projections are split.
        parts: the same for the dimensions that RoPE turns and for the others, where it turns a part of the width.
    """

    norms: Tensor | None
    candidates: tuple[Candidate, ...] = ()
    tolerance: float = 0.0
    layouts: tuple[int, int] = (1, 1)
    parts: "tuple[Origin, ...]" = ()

    @property
    def factor(self) -> float | None:
        """The constant factor since the projection or norm that matched; None if none did."""
        return self._found.factor

    @property
    def change(self) -> str:
        """One of "unchanged", "scaled", "normalised", "by position" (see `curve`), "unknown"."""
        return self._found.change

    @property
    def curve(self) -> Tensor | None:
        """The factor by position since the projection or norm, [batch, tokens] float64; None where it is constant or unknown."""
        return self._found.curve

    @cached_property
    def _found(self) -> _Found:
        if self.norms is None:
            return _Found(1.0, "unchanged")
        norms = self.norms.double()
        for kind, groups in self._sources(norms):
            factor = constant_ratio(norms[:, -groups.shape[1] :], groups, self.tolerance)
            if factor is not None and kind == "norm":
                return _Found(factor, "normalised")
            if factor is not None:
                return _Found(factor, "unchanged" if abs(factor - 1.0) <= self.tolerance else "scaled")
        if norms.shape[0] * norms.shape[1] >= SAMPLES:
            mean = norms.mean((0, 1), keepdim=True)
            if bool(((norms - mean).abs() <= self.tolerance * mean).all()) and bool((mean > 0).all()):
                return _Found(None, "normalised")
        for _, groups in self._sources(norms):
            curve = ratio_by_position(norms, groups, self.tolerance)
            if curve is not None:
                return _Found(None, "by position", curve)
        return _Found(None, "unknown")

    def _sources(self, norms: Tensor) -> Iterator[tuple[str, Tensor]]:
        for kind in ("projection", "norm"):
            for candidate in self.candidates:
                if candidate.kind == kind:
                    for groups in splits(candidate.norms.double(), norms.shape[-1], self.layouts):
                        yield kind, groups


def is_linear(module: nn.Module) -> bool:
    """A projection by type, by the name of its class where a library wraps it, or because it says what it reads and gives."""
    if isinstance(module, nn.Linear) or bool(_LINEAR.search(type(module).__name__)):
        return True
    return isinstance(getattr(module, "in_features", None), int) and isinstance(getattr(module, "out_features", None), int)


def kept_kind(module: nn.Module, owner: nn.Module) -> str | None:
    """Either "projection" or "norm", or None where the output cannot be a q or k (feed-forward parts are wide and never are)."""
    if _FEED_FORWARD.search(type(owner).__name__):
        return None
    if is_linear(module):
        return "projection"
    return "norm" if _NORM.search(type(module).__name__) else None


def origin(operand: Tensor, outputs: list[tuple[str, Tensor]], heads: tuple[int, int], turned: slice | None = None) -> Origin:
    """Reduce the outputs kept so far to what can be compared with q or k, [batch, heads, tokens, d].

    Args:
        turned: which dimensions RoPE turns, where that is not all of them: at the beginning or at the end.
    """
    width = operand.shape[-1]
    found = _reduced(operand, outputs, heads, slice(0, width))
    if turned is None:
        return found
    rest = slice(turned.stop, width) if turned.start == 0 else slice(0, turned.start)
    return replace(found, parts=(_reduced(operand, outputs, heads, turned), _reduced(operand, outputs, heads, rest)))


def _reduced(operand: Tensor, outputs: list[tuple[str, Tensor]], heads: tuple[int, int], part: slice) -> Origin:
    batch, _, tokens, width = operand.shape
    found = tuple(Candidate(kind, norms) for kind, output in outputs for norms in _norms(output, (batch, tokens, width), part))
    # Rotary embeddings round their sines and cosines to the dtype: a norm moves by at most that rounding, and in float32 by a
    # few units; the floor leaves room for sums over d and for tables made in float32 in a float64 model.
    tolerance = max(4 * torch.finfo(operand.dtype).eps, 1e-5)
    return Origin(_norm(operand.transpose(1, 2)[..., part]), found, tolerance, heads)


def _norm(tensor: Tensor) -> Tensor:
    dtype = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) or tensor.device.type == "mps" else torch.float64
    return torch.linalg.vector_norm(tensor, dim=-1, dtype=dtype)


def _norms(output: Tensor, sizes: tuple[int, int, int], part: slice) -> Iterator[Tensor]:
    """[batch, tokens', groups] for every way to read the output as batch × tokens' × groups × width, tokens' ≤ tokens."""
    batch, tokens, width = sizes
    if output.ndim == 4 and output.shape[-1] == width and output.shape[0] == batch:
        for spread in (output, output.transpose(1, 2)):
            if spread.shape[1] <= tokens:
                yield _norm(spread[..., part])
        return
    features = output.shape[-1]
    if output.ndim > 3:
        output = output.flatten(1, -2)  # images, and windows of them
    if output.ndim not in (2, 3) or width == 0 or features == 0 or features % width:
        return
    run = output.numel() // features
    if batch == 0 or run % batch or run // batch > tokens:
        return
    if output.ndim == 3 and output.shape[0] != batch:
        if output.shape[1] != batch:
            return
        output = output.transpose(0, 1)
    yield _norm(output.reshape(batch, run // batch, features // width, width)[..., part])
