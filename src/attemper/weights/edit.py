"""Multiplies heads in place.

It must hold: nothing is written before everything is known to be possible, on every process that holds a shard; numbers of a
head whose factor is 1 keep their bits; a parameter that several modules hold is multiplied once, and never behind the back of
one that was not asked about.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from attemper.errors import ArgumentError, UnsupportedError
from attemper.weights.families import is_linear
from attemper.weights.layout import Heads
from attemper.weights.sharding import Part, largest_of_all, part, reshard


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


class _Rounded(NamedTuple):
    """What multiplying did to the numbers of this process."""

    rounding: float  # the largest relative error
    changed: float  # 1.0 where dividing does not give back the old numbers, else 0.0
    overflow: float  # the largest number where one overflowed, else 0.0


@dataclass(frozen=True)
class _Pending:
    name: str
    parameter: nn.Parameter
    part: Part
    dim: int | None
    features: Tensor  # of the whole parameter, those whose factor is not 1
    local: Tensor  # where those of them that lie on this process do
    values: Tensor
    factors: Tensor
    rounded: _Rounded


class Edits:
    """Edits to one model, gathered by `scale` and done by `write`.

    Args:
        model: the model whose parameters are edited.
    """

    def __init__(self, model: nn.Module) -> None:
        reshard(model)
        self._model = model
        self._pending: dict[int, list[_Pending]] = defaultdict(list)
        self._asked: dict[int, set[int]] = defaultdict(set)

    @torch.no_grad()
    def scale(self, module: str, heads: Heads, factors: Tensor) -> None:
        """Multiply heads of the attention module of that name.

        Args:
            module: dotted name. heads: where they lie. factors: float64 [heads], or [heads, d] where they differ within a head.

        Raises:
            ArgumentError: a parameter is missing, too small, or reparametrised.
            UnsupportedError: a parameter is quantised, of a projection that computes more than W·x + b, or shared with a module
                that asked for something else.
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
            held = part(full, parameter, dim)
            # Apple's GPU has no float64.
            where = torch.device("cpu") if parameter.device.type == "mps" else held.numbers.device
            features, wanted = heads.features[changed], spread[changed]
            here, local = held.here(features, size)
            offset = heads.offset if place == 0 else 0.0
            old = _chosen(held.numbers.to(where), dim, local.to(where))
            by = wanted[here].to(where).reshape((-1, 1) if dim == 0 and parameter.ndim > 1 else (-1,))
            values, rounded = _multiplied(old, by, offset)
            self._pending[id(parameter)].append(_Pending(full, parameter, held, dim, features, local, values, spread, rounded))

    @torch.no_grad()
    def write(self) -> tuple[Edit, ...]:
        """Do it, and say what was done.

        Where parameters are sharded this is a collective: every process that holds a shard writes the same edits.

        Raises:
            UnsupportedError: a parameter is also held by a module that was not asked about. ArgumentError: a number would
                overflow. Nothing is written then, on any process.
        """
        wanted = self.checked()
        rounded = _over_processes(wanted)
        for pending, (_, _, overflow) in zip(wanted, rounded, strict=True):
            if overflow:
                limit = torch.finfo(pending.parameter.dtype).max
                raise ArgumentError(
                    "model", f"{pending.name}, which would overflow at {overflow:.3g}", f"numbers up to {limit:.3g}"
                )
        edits = []
        for pending, (rounding, changed, _) in zip(wanted, rounded, strict=True):
            numbers, dim = pending.part.numbers, pending.dim
            local, values = pending.local.to(numbers.device), pending.values.to(numbers.device)
            if dim is None:
                numbers[torch.unravel_index(local, numbers.shape)] = values
            else:
                numbers.index_copy_(dim, local, values)
            exact = not changed
            edits.append(Edit(pending.name, tuple(pending.factors[:, 0].tolist()), exact, 0.0 if exact else rounding))
        return tuple(edits)

    def checked(self) -> list[_Pending]:
        """What is to be written, once it is known that only modules that were asked about hold it.

        Raises:
            UnsupportedError: a parameter is also held by another module.
        """
        wanted = [pending for each in self._pending.values() for pending in each if pending.features.numel()]
        names = {id(pending.parameter): pending.name for pending in wanted}
        for module_name, module in self._model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in names and id(module) not in self._asked[id(parameter)]:
                    tied = f"{names[id(parameter)]} is tied to {module_name}.{name}"
                    raise UnsupportedError(f"{tied}, which would change with it; untie them first")
        return wanted

    def _resolve(self, full: str) -> tuple[nn.Module, nn.Parameter]:
        path, _, name = full.rpartition(".")
        try:
            owner = self._model.get_submodule(path)
        except AttributeError:
            raise ArgumentError("parameters", full, "the name of a parameter of the model") from None
        if parametrize.is_parametrized(owner, name):
            expected = "a plain weight: remove its parametrisation first (torch.nn.utils.parametrize.remove_parametrizations)"
            raise ArgumentError("model", f"{full}, which is computed from other parameters", expected)
        more = _more_than_product(owner)
        if more:
            kind = f"{path or 'the model'} ({type(owner).__name__})"
            raise UnsupportedError(
                f"{kind} {more}, so it may compute more than W·x, and multiplying W would not multiply its output; "
                "merge and remove what was added first"
            )
        parameter = owner._parameters.get(name)
        if parameter is None:
            raise ArgumentError("parameters", full, "the name of a parameter of the model")
        if not parameter.is_floating_point():
            kind = str(parameter.dtype).removeprefix("torch.")
            raise UnsupportedError(f"{full} is {kind}: quantised weights cannot be edited; edit before quantising")
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


def _more_than_product(owner: nn.Module) -> str:
    """Why a projection may compute more than W·x + b, as a clause; "" where it does not, or is no projection.

    A forward of its class's own is taken at its word where weight and bias are all that it has: those that cast, quantise or
    spread the same product over devices are many.
    """
    if not is_linear(owner):
        return ""
    others = [name for name, _ in owner.named_parameters() if name not in ("weight", "bias")]
    if others:
        rest = f" and {len(others) - 3} more" if len(others) > 3 else ""
        return f"has parameters besides weight and bias ({', '.join(others[:3])}{rest})"
    # Some adapters replace the forward of one instance; accelerate does too, to move the inputs, and leaves a mark.
    if "forward" in vars(owner) and not hasattr(owner, "_hf_hook"):
        return "has a forward that was put over that of its class"
    return ""


def _chosen(parameter: Tensor, dim: int | None, features: Tensor) -> Tensor:
    return parameter.reshape(-1)[features] if dim is None else parameter.index_select(dim, features)


def _over_processes(wanted: list[_Pending]) -> list[_Rounded]:
    """What multiplying did to the whole of each parameter: one maximum over the processes of each mesh."""
    found = {place: pending.rounded for place, pending in enumerate(wanted)}
    by_mesh: dict[object, list[int]] = defaultdict(list)
    for place, pending in enumerate(wanted):
        if pending.part.mesh is not None:
            by_mesh[pending.part.mesh].append(place)
    for mesh, places in by_mesh.items():
        together = largest_of_all(mesh, torch.tensor([found[place] for place in places], dtype=torch.float64))
        found |= {place: _Rounded(*row) for place, row in zip(places, together.tolist(), strict=True)}
    return [found[place] for place in range(len(wanted))]


def _multiplied(old: Tensor, by: Tensor, offset: float) -> tuple[Tensor, _Rounded]:
    """The new numbers, and what became of them."""
    ideal = (old.double() + offset) * by
    new = (ideal - offset).to(old.dtype)
    over = old.isfinite() & ~new.isfinite()
    overflow = float(ideal[over].abs().max()) if bool(over.any()) else 0.0
    powers = all(math.frexp(abs(factor))[0] == 0.5 for factor in by.unique().tolist())
    if old.dtype == torch.float64:
        rounding = 0.0 if powers and not offset else torch.finfo(torch.float64).eps
    else:
        usable = ideal.isfinite() & (ideal != 0)
        error = ((new.double() + offset - ideal).abs() / ideal.abs())[usable]
        rounding = float(error.max()) if error.numel() else 0.0
    restored = ((new.double() + offset) / by - offset).to(old.dtype)
    exact = powers and rounding == 0.0 and torch.equal(restored, old)
    return new, _Rounded(rounding, 0.0 if exact else 1.0, overflow)
