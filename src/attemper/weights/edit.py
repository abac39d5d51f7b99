"""Multiplies heads in place.

It must hold: nothing is written before everything is known to be possible; numbers of a head whose factor is 1 keep their
bits; a parameter that several modules hold is multiplied once, and never behind the back of one that was not asked about.
"""

import math
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from attemper.errors import ArgumentError, UnsupportedError
from attemper.weights.layout import Heads


@dataclass(frozen=True)
class Edit:
    """What was done to one parameter.

    Attributes:
        parameter: its name in the model.
        factors: one for each head, 1.0 where it was left alone; that of the first feature where they differ within a head.
        exact: whether dividing by the factors gives back the old numbers, bit by bit.
        rounding: the largest relative error of a new number: about the eps of its dtype, 0 where exact; much more where a norm
            multiplies by 1 + w and w is near −1.
    """

    parameter: str
    factors: tuple[float, ...]
    exact: bool
    rounding: float


@dataclass(frozen=True)
class _Pending:
    name: str
    parameter: nn.Parameter
    dim: int | None
    features: Tensor
    values: Tensor
    factors: Tensor
    edit: Edit


class Edits:
    """Edits to one model, gathered by `scale` and done by `write`.

    Args:
        model: the model whose parameters are edited.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._pending: dict[int, list[_Pending]] = defaultdict(list)
        self._asked: dict[int, set[int]] = defaultdict(set)

    @torch.no_grad()
    def scale(self, module: str, heads: Heads, factors: Tensor) -> None:
        """Multiply heads of the attention module of that name.

        Args:
            module: dotted name. heads: where they lie. factors: float64 [heads], or [heads, d] where they differ within a head.

        Raises:
            ArgumentError: a parameter is missing, too small, reparametrised, or a number would overflow.
            UnsupportedError: a parameter is quantised, or shared with a module that asked for something else.
        """
        spread = factors if factors.ndim == 2 else factors[:, None].expand(heads.features.shape)
        changed = spread != 1.0
        for place, name in enumerate(heads.parameters):
            full = f"{module}.{name}" if module else name
            owner, parameter = self._resolve(full)
            self._asked[id(parameter)].add(id(owner))
            dim = None if heads.dim is None else heads.dim if parameter.ndim > 1 else 0
            size = parameter.numel() if dim is None else parameter.shape[dim]
            if int(heads.features.max()) >= size:
                raise ArgumentError(
                    "features", f"output {int(heads.features.max())} of {full}", f"one below {size}, which it has"
                )
            if self._told(full, parameter, heads.features, spread):
                continue
            where = torch.device("cpu") if parameter.device.type == "mps" else parameter.device  # which has no float64
            features = heads.features[changed].to(where)
            wanted = spread[changed]
            offset = heads.offset if place == 0 else 0.0
            old = _chosen(parameter.to(where), dim, features)
            by = wanted.to(where).reshape((-1, 1) if dim == 0 and parameter.ndim > 1 else (-1,))
            values, rounding = _multiplied(old, by, offset, full)
            powers = all(math.frexp(abs(factor))[0] == 0.5 for factor in wanted.unique().tolist())
            restored = ((values.double() + offset) / by - offset).to(old.dtype)
            exact = powers and rounding == 0.0 and torch.equal(restored, old)
            edit = Edit(full, tuple(spread[:, 0].tolist()), exact, 0.0 if exact else rounding)
            self._pending[id(parameter)].append(_Pending(full, parameter, dim, features, values, spread, edit))

    @torch.no_grad()
    def write(self) -> tuple[Edit, ...]:
        """Do it, and say what was done.

        Raises:
            UnsupportedError: a parameter is also held by a module that was not asked about. Nothing is written then.
        """
        wanted = [pending for each in self._pending.values() for pending in each if pending.features.numel()]
        names = {id(pending.parameter): pending.name for pending in wanted}
        for module_name, module in self._model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in names and id(module) not in self._asked[id(parameter)]:
                    tied = f"{names[id(parameter)]} is tied to {module_name}.{name}"
                    raise UnsupportedError(f"{tied}, which would change with it; untie them first")
        edits = []
        for pending in wanted:
            parameter, dim = pending.parameter, pending.dim
            features, values = pending.features.to(parameter.device), pending.values.to(parameter.device)
            if dim is None:
                parameter[torch.unravel_index(features, parameter.shape)] = values
            else:
                parameter.index_copy_(dim, features, values)
            edits.append(pending.edit)
        return tuple(edits)

    def _resolve(self, full: str) -> tuple[nn.Module, nn.Parameter]:
        path, _, name = full.rpartition(".")
        try:
            owner = self._model.get_submodule(path)
        except AttributeError:
            raise ArgumentError("parameters", full, "the name of a parameter of the model") from None
        if parametrize.is_parametrized(owner, name):
            expected = "a plain weight: remove its parametrisation first (torch.nn.utils.parametrize.remove_parametrizations)"
            raise ArgumentError("model", f"{full}, which is computed from other parameters", expected)
        parameter = owner._parameters.get(name)
        if parameter is None:
            raise ArgumentError("parameters", full, "the name of a parameter of the model")
        if not parameter.is_floating_point():
            kind = str(parameter.dtype).removeprefix("torch.")
            raise UnsupportedError(f"{full} is {kind}: quantised weights cannot be edited; edit before quantising")
        if hasattr(parameter, "placements"):
            raise UnsupportedError(f"{full} is sharded (DTensor): edit before the model is distributed")
        return owner, parameter

    def _told(self, full: str, parameter: nn.Parameter, features: Tensor, spread: Tensor) -> bool:
        """Whether this very edit is pending, through another module that holds the parameter."""
        changed = set(features[spread != 1.0].tolist())
        for pending in self._pending[id(parameter)]:
            if pending.name != full:
                if pending.factors.shape == spread.shape and torch.equal(pending.factors, spread):
                    return True
                raise UnsupportedError(f"{full} and {pending.name} are one parameter, which cannot be multiplied by two factors")
            if changed & set(pending.features.tolist()):
                raise ArgumentError("features", f"outputs of {full} named for q and for k", "each output for one of them")
        return False


def _chosen(parameter: Tensor, dim: int | None, features: Tensor) -> Tensor:
    return parameter.reshape(-1)[features] if dim is None else parameter.index_select(dim, features)


def _multiplied(old: Tensor, by: Tensor, offset: float, name: str) -> tuple[Tensor, float]:
    """The new numbers, and their largest relative error."""
    ideal = (old.double() + offset) * by
    new = (ideal - offset).to(old.dtype)
    if not bool((new.isfinite() | ~old.isfinite()).all()):
        largest = torch.finfo(old.dtype).max
        raise ArgumentError("model", f"{name}, which would overflow at {ideal.abs().max():.3g}", f"numbers up to {largest:.3g}")
    if old.dtype == torch.float64:
        powers = all(math.frexp(abs(factor))[0] == 0.5 for factor in by.unique().tolist())
        return new, 0.0 if powers and not offset else torch.finfo(torch.float64).eps
    usable = ideal.isfinite() & (ideal != 0)
    error = ((new.double() + offset - ideal).abs() / ideal.abs())[usable]
    return new, float(error.max()) if error.numel() else 0.0
