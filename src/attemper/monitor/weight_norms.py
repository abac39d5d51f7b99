"""Frobenius norms of the projections of attention modules, as `LayerRecord.norms` has them.

What it must hold: where the projections lie is found once; each measurement reads every matrix once, copies none, waits for no
device, and gives the norm of the whole matrix where ranks hold parts of it (DTensor: FSDP2, tensor parallel). Behind QK-norm the
norms of the projections have no effect on the logits, and are not given. Nor are they where a projection is no parameter of the
size that it had, or has no numbers: reparametrised, pruned, quantised, replaced, on the meta device. No such change ends a run.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attemper.errors import UnsupportedError
from attemper.weights.families import projections_of, value_weight

_SUMMED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class _Part:
    """Some outputs of one matrix: parameter, along which dimension its outputs lie, and which they are (None: all).

    `shape` is that of the matrix as it was found.
    """

    parameter: str
    dim: int
    features: Tensor | None
    shape: torch.Size

    @functools.cached_property
    def columns(self) -> slice | None:
        """The same where they are columns beside one another; else None."""
        if self.dim == 0:
            return None
        if self.features is None:
            return slice(None)
        first, count = int(self.features[0]), len(self.features)
        following = torch.arange(first, first + count, device=self.features.device)
        return slice(first, first + count) if torch.equal(self.features, following) else None


class ProjectionNorms:
    """The norms of W_q, W_k and W_v of some attention modules of a model.

    Args:
        model: whose parameters are read at each measurement.
        layers: names of the modules, as `named_modules` gives them.
    """

    def __init__(self, model: nn.Module, layers: Iterable[str]) -> None:
        self._model = model
        self._parts = {name: _parts(model, name) for name in layers}

    @torch.no_grad()
    def measure(self) -> dict[str, Tensor | None]:
        """By layer: ‖W_q‖, ‖W_k‖, ‖W_v‖, float32 [3] on the device of the parameters; None where the layout is not known.

        Where parameters are DTensors this is a collective: every rank calls it.
        """
        return {name: None if parts is None else self._norms(name, parts) for name, parts in self._parts.items()}

    def _norms(self, name: str, parts: tuple[_Part, ...]) -> Tensor | None:
        squares: dict[str, Tensor] = {}  # of each output, since q, k and v may lie in one matrix
        norms = []
        for part in parts:
            weight = _matrix(self._model, name, part.parameter)
            if weight is None or weight.is_meta or weight.shape != part.shape:
                return None
            if part.columns is not None and not hasattr(weight, "full_tensor"):
                # Down the columns torch's norm takes three times as long as along the rows.
                of_rows = torch.linalg.vector_norm(weight[:, part.columns], dim=1, dtype=_wide(weight))
                norms.append(torch.linalg.vector_norm(of_rows).float())
                continue
            if part.parameter not in squares:
                squares[part.parameter] = _squares(weight, part.dim)
            square = squares[part.parameter]
            norms.append((square if part.features is None else square[part.features.to(square.device)]).sum().sqrt())
        return torch.stack([norm.to(norms[0].device) for norm in norms])


def _parts(model: nn.Module, name: str) -> tuple[_Part, ...] | None:
    """q, k and v; None where one of them is not known, or norms stand behind q and k."""
    try:
        projections = projections_of(model, name)
        value = None if projections is None else value_weight(model.get_submodule(name), projections)
    except (AttributeError, UnsupportedError):  # no such module or parameter, or a layout that no row of the table fits
        return None
    if projections is None or projections.query.dim is None or projections.key is None or projections.key.dim is None:
        return None
    if value is None:
        return None
    found = [(heads.parameters[0], heads.dim or 0, heads.features.flatten()) for heads in (projections.query, projections.key)]
    parts = []
    for parameter, dim, features in (*found, (value[0], projections.key.dim, value[1])):
        weight = _matrix(model, name, parameter)
        if weight is None:
            return None
        parts.append(_Part(parameter, dim, features, weight.shape))
    return tuple(parts)


def _matrix(model: nn.Module, module: str, name: str) -> Tensor | None:
    """A parameter of a module, if there is one that is a matrix of numbers that can be summed."""
    try:
        parameter = model.get_submodule(module).get_parameter(name)
    except AttributeError:  # gone, or computed from others
        return None
    return parameter if parameter.ndim == 2 and parameter.dtype in _SUMMED else None


def _squares(weight: Tensor, dim: int) -> Tensor:
    """The square of the length of each output's row, float32 [outputs]; of a DTensor that of the whole, on every rank."""
    lengths: Any = torch.linalg.vector_norm(weight, dim=1 - dim, dtype=_wide(weight))
    whole = getattr(lengths, "full_tensor", None)
    return (lengths if whole is None else whole()).float().square()


def _wide(weight: Tensor) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.float32)
