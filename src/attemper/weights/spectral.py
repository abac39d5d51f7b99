"""`spectral_reparam`: projections trained as a direction and a spectral norm of their own."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from attemper.errors import ArgumentError, UnsupportedError
from attemper.weights.families import find_projections, is_linear
from attemper.weights.layout import Projections

# The power method stops when σ changes by less than this, relatively, or after so many steps.
_SETTLED, _STEPS = 1e-9, 1000


class SigmaReparam(nn.Module):
    """Ŵ = (γ/σ(W))·W with a learned γ, as a parametrisation: the spectral norm of Ŵ is γ, whatever W.

    σ(W) = uᵀ·W·v; its vectors u and v are constants to the gradient, and follow W by one step of the power method at each
    forward pass in training (also at one that activation checkpointing repeats). Computed in float32, or float64 where W is.

    Args:
        weight: W, [outputs, inputs], of any dtype; in bfloat16 and float16 Ŵ is rounded to its dtype.
        gain: γ at the start, above 0; None: σ(W), so that Ŵ is W.

    Raises:
        ArgumentError: weight is no matrix of floating numbers, is 0 or not finite; gain is not above 0.

    Source: Zhai et al. 2023 (σReparam, arXiv 2303.06296), section 3; there γ starts at 1.
    """

    left: Tensor
    right: Tensor

    def __init__(self, weight: Tensor, gain: float | None = None) -> None:
        super().__init__()
        if weight.ndim != 2 or not weight.is_floating_point():
            given = f"{str(weight.dtype).removeprefix('torch.')} {list(weight.shape)}"
            raise ArgumentError("weight", given, "a matrix of floating numbers")
        if gain is not None and not (math.isfinite(gain) and gain > 0):
            raise ArgumentError("gain", repr(gain), "a finite number above 0, or None to start from the weight as it is")
        with torch.no_grad():
            left, right, sigma = _largest(_wide(weight))
            if not bool(sigma.isfinite() & (sigma > 0)):
                raise ArgumentError("weight", f"a matrix with spectral norm {float(sigma)}", "one that is finite and not 0")
        self.register_buffer("left", left)
        self.register_buffer("right", right)
        self.gain = nn.Parameter(sigma.clone() if gain is None else torch.full_like(sigma, gain))

    def forward(self, weight: Tensor) -> Tensor:
        """Ŵ, [outputs, inputs], in the dtype of W, the weight that is given."""
        matrix = _wide(weight)
        if self.training:
            with torch.no_grad():
                left, right = _step(matrix, self.right.to(matrix.dtype))
                self.left.copy_(left)
                self.right.copy_(right)
        # Copies: the next forward pass writes over the buffers, which the backward pass of this one still needs.
        left, right = (vector.to(matrix.dtype, copy=True) for vector in (self.left, self.right))
        sigma = torch.dot(left, matrix @ right)
        return (matrix * (self.gain.to(matrix.dtype) / sigma)).to(weight.dtype)


@torch.no_grad()
def spectral_norm(weight: Tensor) -> float:
    """σ(W), the largest singular value of a matrix, by the power method: it is approached from below; 0 of a zero matrix."""
    return float(_largest(_wide(weight))[2])


@dataclass(frozen=True)
class Reparametrised:
    """What `spectral_reparam` did.

    Attributes:
        model: the model. weights: names of the weights that are computed now.
    """

    model: nn.Module
    weights: tuple[str, ...]

    def remove(self) -> None:
        """Make them plain weights again, with the values that they have now: the function stays, γ goes."""
        for name in self.weights:
            path, _, tensor = name.rpartition(".")
            owner: Any = self.model.get_submodule(path)
            for one in owner.parametrizations[tensor]:
                one.eval()  # without another step of the power method
            parametrize.remove_parametrizations(owner, tensor)


def spectral_reparam(
    model: nn.Module,
    *,
    which: Literal["qk", "all"] = "qk",
    gain: float | None = None,
    layouts: Mapping[str, Projections] | None = None,
) -> Reparametrised:
    """Replace each projection's weight W by (γ/σ(W))·W with a learned γ, in place: σReparam.

    Logits grow with the spectral norms of W_q and W_k; here each is one number that the optimiser moves, and weight decay or a
    learning rate of its own reach it. Make the optimiser afterwards: there are new parameters, `parametrizations.weight.0.gain`,
    and W is `parametrizations.weight.original`. A model that is to load such a state dict is reparametrised first.
    A fused projection is one matrix, and has one γ. Behind norms on q and k the projections' norms have no effect on the logits.

    Args:
        model: any module: a model, one attention module, or one nn.Linear.
        which: "qk": the projections of q and k (of MLA, the last ones: q_b_proj and kv_b_proj). "all": every Linear-like module
            in it, as in the paper, except weights that several modules hold.
        gain: γ at the start; None: σ(W), so that the function stays what it is. 1.0 is the paper's, for training from scratch.
        layouts: see `find_projections`.

    Returns:
        Names of the weights, and `remove()`, which leaves plain weights and the same function.

    Raises:
        ArgumentError: which is another word, gain is not above 0, a weight is 0 or reparametrised already, or there is none.
        UnsupportedError: a layout is unknown, a projection's weight is shared with another module or is quantised.

    Source: Zhai et al. 2023 (arXiv 2303.06296), section 3.
    """
    if which not in ("qk", "all"):
        raise ArgumentError("which", repr(which), '"qk" or "all"')
    holders: dict[int, int] = defaultdict(int)
    for module in model.modules():
        for parameter in module._parameters.values():
            holders[id(parameter)] += 1
    found = []
    for name in dict.fromkeys(_names(model, which, layouts)):
        path, _, tensor = name.rpartition(".")
        owner = model.get_submodule(path)
        if parametrize.is_parametrized(owner, tensor):
            raise ArgumentError("model", f"{name}, which is computed from other parameters already", "plain weights")
        weight = getattr(owner, tensor, None)
        if not isinstance(weight, nn.Parameter) or not weight.is_floating_point() or weight.ndim != 2:
            raise UnsupportedError(f"{name} is no matrix of floating numbers: reparametrise before quantising")
        if holders[id(weight)] > 1:
            if which == "all":
                continue
            raise UnsupportedError(f"{name} is held by several modules, which would no longer share it; untie them first")
        found.append((name, owner, tensor, SigmaReparam(weight, gain)))
    if not found:
        raise ArgumentError("model", f"{type(model).__name__} without a projection", "a module with at least one")
    for _, owner, tensor, reparametrisation in found:
        reparametrisation.train(owner.training)
        parametrize.register_parametrization(owner, tensor, reparametrisation)
    return Reparametrised(model, tuple(name for name, *_ in found))


def _names(model: nn.Module, which: str, layouts: Mapping[str, Projections] | None) -> Iterator[str]:
    if which == "all" or is_linear(model):
        for name, module in model.named_modules():
            if is_linear(module):
                yield f"{name}.weight" if name else "weight"
        if is_linear(model):
            return
    try:
        found = find_projections(model, layouts)
    except (ArgumentError, UnsupportedError):
        if which == "all":  # whatever its attention looks like
            return
        raise
    for name, projections in found.items():
        for weight in projections.weights:
            yield f"{name}.{weight}" if name else weight


def _largest(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """u, v and σ of the largest singular value."""
    start = torch.randn(matrix.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    left, right = _step(matrix, F.normalize(start.to(matrix), dim=0))
    sigma = torch.dot(left, matrix @ right)
    for _ in range(_STEPS):
        left, right = _step(matrix, right)
        before, sigma = sigma, torch.dot(left, matrix @ right)
        if bool((sigma - before).abs() <= _SETTLED * sigma):
            break
    return left, right, sigma


def _step(matrix: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """One step of the power method: u and v."""
    left = F.normalize(matrix @ right, dim=0)
    return left, F.normalize(matrix.mT @ left, dim=0)


def _wide(weight: Tensor) -> Tensor:
    return weight if weight.dtype == torch.float64 else weight.float()
