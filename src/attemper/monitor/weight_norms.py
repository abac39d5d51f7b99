"""Frobenius norms of the projections of attention modules, as `LayerRecord.norms` has them.

What it must hold: where the projections lie is found once; each measurement reads every matrix once, copies none, waits for no
device, and gives the norm of the whole matrix where ranks hold parts of it (DTensor: FSDP2, tensor parallel). Behind QK-norm the
norms of the projections have no effect on the logits, and are not given.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attemper.errors import UnsupportedError
from attemper.weights.families import projections_of, value_weight
from attemper.weights.layout import Projections


@dataclass(frozen=True, eq=False)
class _Part:
    """Some outputs of one matrix: parameter, along which dimension its outputs lie, and which they are (None: all)."""

    parameter: str
    dim: int
    features: Tensor | None

    @functools.cached_property
    def columns(self) -> slice | None:
        """The same where they are columns beside one another; else None."""
        if self.dim == 0:
            return None
        if self.features is None:
            return slice(None)
        first, count = int(self.features[0]), len(self.features)
        return slice(first, first + count) if torch.equal(self.features.cpu(), torch.arange(first, first + count)) else None


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

    def _norms(self, name: str, parts: tuple[_Part, ...]) -> Tensor:
        module = self._model.get_submodule(name)
        squares: dict[str, Tensor] = {}  # of each output, since q, k and v may lie in one matrix
        norms = []
        for part in parts:
            weight = module.get_parameter(part.parameter)
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
    except (AttributeError, UnsupportedError):  # no such module, or a layout that no row of the table fits
        return None
    if projections is None or projections.query.dim is None or projections.key is None or projections.key.dim is None:
        return None
    module = model.get_submodule(name)
    value = value_weight(module, projections)
    if value is None or not all(_is_matrix(module, each) for each in (*_names(projections), value[0])):
        return None
    query, key = (
        _Part(heads.parameters[0], heads.dim or 0, heads.features.flatten()) for heads in (projections.query, projections.key)
    )
    return query, key, _Part(value[0], projections.key.dim, value[1])


def _names(projections: Projections) -> list[str]:
    return [heads.parameters[0] for heads in (projections.query, projections.key) if heads is not None]


def _is_matrix(module: nn.Module, name: str) -> bool:
    parameter = module.get_parameter(name)
    return parameter.ndim == 2 and parameter.is_floating_point()


def _squares(weight: Tensor, dim: int) -> Tensor:
    """The square of the length of each output's row, float32 [outputs]; of a DTensor that of the whole, on every rank."""
    lengths: Any = torch.linalg.vector_norm(weight, dim=1 - dim, dtype=_wide(weight))
    whole = getattr(lengths, "full_tensor", None)
    return (lengths if whole is None else whole()).float().square()


def _wide(weight: Tensor) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.float32)
