"""Runs a checkpoint that is larger than memory: the weights of a block are read before it runs and dropped after it.

What it must hold: the figures are those of the ordinary way, bit for bit; buffers (RoPE's frequencies, say) are real from the
start; parameters that are shared stay so; what this way cannot do is refused, not approximated. Between its turns a parameter
is a tensor on "meta": code that reads it then fails, and never gets wrong numbers.
"""

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attemper.checker.budget import Budget
from attemper.errors import LoadError, UnsupportedError

_WITHOUT = "check it without --max-memory, or with more"


@dataclass(frozen=True)
class Source:
    """Where the numbers of one tensor are: a name in a safetensors file, and the dtype to have them in."""

    file: Path
    key: str
    dtype: torch.dtype | None

    def read(self) -> Tensor:
        """The tensor, in memory of its own: nothing of the file stays mapped."""
        from safetensors import safe_open

        with safe_open(self.file, framework="pt", device="cpu") as stored:
            tensor = stored.get_tensor(self.key)
            return tensor.to(self.dtype or tensor.dtype, copy=True)


@dataclass(frozen=True)
class Unit:
    """A part of a model whose weights come and go together: (module, name of its parameter) of each."""

    name: str
    module: nn.Module
    slots: tuple[tuple[nn.Module, str], ...]

    @property
    def bytes(self) -> int:
        """What its weights take, each counted once."""
        parameters = {id(module._parameters[name]): module._parameters[name] for module, name in self.slots}
        return sum(each.numel() * each.element_size() for each in parameters.values() if each is not None)


@contextlib.contextmanager
def hollow_parameters() -> Generator[None]:
    """Modules that are built inside have their parameters on "meta" and their buffers in memory, with their values."""
    register = nn.Module.register_parameter

    def registered(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:  # one that is there already is shared, and stays the same object
            param = nn.Parameter(param.detach().to("meta"), requires_grad=False)
        register(self, name, param)

    nn.Module.register_parameter = registered
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def stream(model: nn.Module, stored: Mapping[str, Path], dtype: torch.dtype, prefix: str, budget: Budget) -> tuple[str, ...]:
    """Let a hollow model read its weights while it runs.

    Args:
        model: built under `hollow_parameters`; stored: the file of each tensor of the checkpoint.
        dtype: what floating-point weights are to be in. prefix: what names in the checkpoint may have or lack in front.
        budget: looked at whenever weights come.

    Returns:
        The tensors of the checkpoint that the model has no use for.

    Raises:
        UnsupportedError: the checkpoint has parameters under other names, or not at all.
        LoadError: shapes differ, or it cannot fit.
    """
    sources = _sources(model, stored, dtype, prefix)
    residents, units = _units(model)
    budget.require(residents.bytes + max((unit.bytes for unit in units), default=0), "its largest block needs")
    used = {source.key for source in sources.values()}
    for name, buffer in model.named_buffers():
        if (key := _key(name, stored, prefix)) is not None:
            used.add(key)
            buffer.data = Source(stored[key], key, dtype if buffer.is_floating_point() else None).read()
    _Coming(residents, sources, budget).load()
    for unit in units:
        coming = _Coming(unit, sources, budget)
        unit.module.register_forward_pre_hook(coming.enter, prepend=True)
        unit.module.register_forward_hook(coming.leave, always_call=True)
    tied = {key for name, _ in model.named_parameters(remove_duplicate=False) if (key := _key(name, stored, prefix)) is not None}
    return tuple(key for key in stored if key not in used | tied)


def values(parameter: Tensor) -> Tensor:
    """The numbers of a parameter, read for the occasion if it is not in memory."""
    source = getattr(parameter, "_attemper_source", None)
    return source.read() if parameter.is_meta and isinstance(source, Source) else parameter


@dataclass
class _Coming:
    """The hooks of a unit."""

    unit: Unit
    sources: Mapping[int, Source]
    budget: Budget
    running: int = 0
    away: list[tuple[nn.Module, str, nn.Parameter]] = field(default_factory=list)

    def enter(self, _module: nn.Module, _args: Any) -> None:
        """Before the unit runs."""
        self.running += 1
        if self.running == 1:
            self.load()

    def leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        """After it, also if it raised."""
        self.running -= 1
        if self.running == 0:
            for module, name, parameter in self.away:
                module._parameters[name] = parameter
            self.away.clear()

    def load(self) -> None:
        """Put the numbers in place of the hollow parameters."""
        loaded: dict[int, nn.Parameter] = {}
        for module, name in self.unit.slots:
            hollow = module._parameters[name]
            assert hollow is not None
            if id(hollow) not in loaded:
                loaded[id(hollow)] = nn.Parameter(self.sources[id(hollow)].read(), requires_grad=False)
            self.away.append((module, name, hollow))
            module._parameters[name] = loaded[id(hollow)]
        self.budget.look(self.unit.name or "the model itself")


def _units(model: nn.Module) -> tuple[Unit, list[Unit]]:
    """What stays in memory, and what comes and goes: the entries of lists of blocks, and modules beside those lists."""
    staying: list[tuple[nn.Module, str]] = []
    units: list[Unit] = []

    def visit(name: str, module: nn.Module) -> None:
        if isinstance(module, nn.ModuleList):
            units.extend(_unit(f"{name}.{number}", child) for number, child in enumerate(module))
        elif name and not any(isinstance(inner, nn.ModuleList) for inner in module.modules()):
            units.append(_unit(name, module))
        else:  # its own parameters are used by code that runs between the blocks
            staying.extend((module, own) for own, parameter in module._parameters.items() if parameter is not None)
            for child_name, child in module.named_children():
                visit(f"{name}.{child_name}" if name else child_name, child)

    visit("", model)
    return Unit("", model, tuple(staying)), [unit for unit in units if unit.slots]


def _unit(name: str, module: nn.Module) -> Unit:
    slots = [(inner, own) for inner in module.modules() for own, value in inner._parameters.items() if value is not None]
    return Unit(name, module, tuple(slots))


def _sources(model: nn.Module, stored: Mapping[str, Path], dtype: torch.dtype, prefix: str) -> dict[int, Source]:
    sources: dict[int, Source] = {}
    lacking: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in sources:
            continue
        key = _key(name, stored, prefix)
        if key is None:
            lacking.setdefault(id(parameter), name)
            continue
        source = Source(stored[key], key, dtype if parameter.is_floating_point() else None)
        if (shape := _shape(source)) != list(parameter.shape):
            raise LoadError(f"{source.file}: {key!r} has shape {shape}, and config.json asks for {list(parameter.shape)}")
        sources[id(parameter)] = source
        parameter._attemper_source = source  # pyrefly: ignore
    missing = [name for which, name in lacking.items() if which not in sources]
    if missing:
        raise UnsupportedError(
            f"--max-memory: the files have no tensor for {len(missing)} parameters under their own names, such as "
            f"{missing[0]}: they are lacking, or have to be converted, which is not done block by block; {_WITHOUT}"
        )
    return sources


def _key(name: str, stored: Mapping[str, Path], prefix: str) -> str | None:
    """The name of a tensor in the checkpoint, which may have been saved without the head or with one."""
    candidates = (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")) if prefix else (name,)
    return next((each for each in candidates if each in stored), None)


def _shape(source: Source) -> list[int]:
    from safetensors import safe_open

    with safe_open(source.file, framework="pt", device="cpu") as file:
        return list(file.get_slice(source.key).get_shape())


def tensors_of(files: tuple[Path, ...]) -> Iterator[tuple[str, Path]]:
    """(name, file) of each tensor in safetensors files."""
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt", device="cpu") as stored:
            yield from ((key, file) for key in stored.keys())  # noqa: SIM118 - it is no mapping


def hollow(build: Callable[[], Any]) -> Any:
    """What a function builds, its parameters on "meta"."""
    with hollow_parameters():
        return build()
