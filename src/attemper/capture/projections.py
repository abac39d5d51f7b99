"""Follows q and k back to their projections, to tell by how much they were scaled on the way.

A model may scale q before the call (Whisper, OPT), scale q and k each (LightGlue), or normalise them (Gemma 3): the factor
that the call applies is then not the whole scale. While a module runs, the outputs of the Linear-like and norm modules that it
owns are kept; at the call only their norms over each group of d numbers stay, d times smaller, and the outputs are let go.

Norms are compared because rotary embeddings keep them, in every pairing of dimensions and where they rotate a part only. So
the factor is measured, not read from an attribute: q's norms over the projection's are one number for all tokens and heads.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

_LINEAR = re.compile(r"(Linear(\d+bit\w*)?|^Conv1D)$")  # nn.Linear, wrapped, quantised and parallel ones, GPT-2's Conv1D
_NORM = re.compile(r"Norm")
_FEED_FORWARD = re.compile(r"mlp|feedforward|ffn|expert|moe|router|intermediate", re.IGNORECASE)
# Fewer ratios than this are constant by accident too easily.
_SAMPLES = 8


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
    """

    norms: Tensor | None
    candidates: tuple[Candidate, ...] = ()
    tolerance: float = 0.0
    layouts: tuple[int, int] = (1, 1)

    @property
    def factor(self) -> float | None:
        """The constant factor since the projection or norm that matched; None if none did."""
        return self._found[0]

    @property
    def change(self) -> str:
        """One of "unchanged", "scaled", "normalised", "unknown"."""
        return self._found[1]

    @cached_property
    def _found(self) -> tuple[float | None, str]:
        if self.norms is None:
            return 1.0, "unchanged"
        norms = self.norms.double()
        for kind in ("projection", "norm"):
            for candidate in self.candidates:
                if candidate.kind != kind:
                    continue
                for groups in _splits(candidate.norms.double(), self.norms.shape[-1], self.layouts):
                    factor = _constant_ratio(norms[:, -groups.shape[1] :], groups, self.tolerance)
                    if factor is None:
                        continue
                    if kind == "norm":
                        return factor, "normalised"
                    return factor, "unchanged" if abs(factor - 1.0) <= self.tolerance else "scaled"
        if norms.shape[0] * norms.shape[1] >= _SAMPLES:
            mean = norms.mean((0, 1), keepdim=True)
            if bool(((norms - mean).abs() <= self.tolerance * mean).all()) and bool((mean > 0).all()):
                return None, "normalised"
        return None, "unknown"


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


def origin(operand: Tensor, outputs: list[tuple[str, Tensor]], heads: tuple[int, int]) -> Origin:
    """Reduce the outputs kept so far to what can be compared with q or k, [batch, heads, tokens, d]."""
    batch, _, tokens, width = operand.shape
    found = tuple(Candidate(kind, norms) for kind, output in outputs for norms in _norms(output, batch, tokens, width))
    # Rotary embeddings round their sines and cosines to the dtype: a norm moves by at most that rounding, and in float32 by a
    # few units; the floor leaves room for sums over d and for tables made in float32 in a float64 model.
    tolerance = max(4 * torch.finfo(operand.dtype).eps, 1e-5)
    return Origin(_norm(operand.transpose(1, 2)), found, tolerance, heads)


def _norm(tensor: Tensor) -> Tensor:
    dtype = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) or tensor.device.type == "mps" else torch.float64
    return torch.linalg.vector_norm(tensor, dim=-1, dtype=dtype)


def _norms(output: Tensor, batch: int, tokens: int, width: int) -> Iterator[Tensor]:
    """[batch, tokens', groups] for every way to read the output as batch × tokens' × groups × width, tokens' ≤ tokens."""
    if output.ndim == 4 and output.shape[-1] == width and output.shape[0] == batch:
        for spread in (output, output.transpose(1, 2)):
            if spread.shape[1] <= tokens:
                yield _norm(spread)
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
    yield _norm(output.reshape(batch, run // batch, features // width, width))


def _splits(norms: Tensor, count: int, heads: tuple[int, int]) -> Iterator[Tensor]:
    """The ways in which `count` heads may lie in the groups of a projection: [batch, tokens, count] each.

    Contiguous ([q | k | v], at every boundary that q's and k's heads make), interleaved by head ([heads, 2 to 4, d]) or by key
    head ([kv_heads, its q's + k + v, d]), and repeated (fewer key heads than the call received).
    """
    groups = norms.shape[-1]
    q, k = heads
    bounds = {0, q, k, q + k, 2 * q, 2 * k, groups - count, groups - 2 * count}
    for start in sorted(bounds):
        if 0 <= start <= groups - count:
            yield norms[..., start : start + count]
    stride = groups // count
    if groups == stride * count and 2 <= stride <= 4:
        for start in range(stride):
            yield norms[..., start::stride]
    if q > k > 0 and q % k == 0 and groups == k * (q // k + 2):
        split = norms.unflatten(-1, (k, q // k + 2))
        yield split[..., :-2].flatten(-2) if count == q else split[..., -2]
    if groups < count and count % groups == 0:
        yield norms.repeat_interleave(count // groups, dim=-1)


def _constant_ratio(operand: Tensor, groups: Tensor, tolerance: float) -> float | None:
    """operand ≈ factor · groups for one factor; None where the ratio varies or there is too little to tell."""
    usable = groups > 0
    if operand.shape != groups.shape or groups.numel() < _SAMPLES:
        return None
    factor = (operand * groups).sum() / (groups * groups).sum().clamp_min(torch.finfo(torch.float64).tiny)
    close = (operand - factor * groups).abs() <= tolerance * factor * groups
    if bool((close | ~usable).all()) and bool((operand[~usable] == 0).all()) and bool(factor > 0):
        return float(factor)
    return None
