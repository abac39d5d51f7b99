"""Runs a checkpoint that is larger than memory: the weights of a block are read before it runs and dropped after it.

What it must hold: the figures are those of the ordinary way, bit for bit; buffers (RoPE's frequencies, say) are real from the
start; parameters that are shared stay so; what this way cannot do is refused, not approximated. Between its turns a parameter
is an `Away`, which has shape, dtype and device and no numbers: code that reads it then fails, and never gets wrong numbers. (A
tensor on "meta" will not do: models send their inputs to where their weights are, and an embedding of such ids is noise.)
"""

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from attemper.checker.budget import Budget
from attemper.errors import LoadError, UnsupportedError
from attemper.memory import give_back

# What a tensor tells of itself without a look at its numbers.
_TOLD = frozenset(
    {
        "shape",
        "dtype",
        "device",
        "layout",
        "ndim",
        "size",
        "dim",
        "numel",
        "nelement",
        "element_size",
        "stride",
        "itemsize",
        "nbytes",
    }
    | {"requires_grad", "is_leaf", "is_contiguous", "is_floating_point", "is_complex", "get_device", "__len__"}
    | {f"is_{kind}" for kind in ("cpu", "cuda", "mps", "xpu", "meta", "sparse", "quantized", "nested", "mkldnn")}
)
_WITHOUT = "check it without --max-memory, or with more"


@dataclass(frozen=True)
class Source:
    """Where the numbers of one tensor are: a name in a safetensors file, and the dtype to have them in.

    Read as transformers reads it, and not copied without need: where its bytes lie decides which way a product is summed.
    """

    file: Path
    key: str
    dtype: torch.dtype | None

    def read(self) -> Tensor:
        """The tensor; the file stays mapped as long as it lives."""
        from safetensors import safe_open

        with safe_open(self.file, framework="pt", device="cpu") as stored:
            tensor = stored.get_slice(self.key)[...]
            return tensor.to(self.dtype or tensor.dtype)


class Away(nn.Parameter):
    """A parameter whose numbers are on disk: it tells what a tensor tells of itself, and nothing can be computed with it.

    Attributes:
        source: where its numbers are.
    """

    source: Source

    @classmethod
    def of(cls, like: Tensor, source: Source) -> Self:
        """A parameter of the shape and dtype of another, whose numbers are elsewhere: one number, repeated, takes no memory."""
        blank = torch.full((), torch.nan) if like.is_floating_point() else torch.zeros(())
        made = torch.Tensor._make_subclass(cls, blank.to(like.dtype).expand(like.shape), like.requires_grad)
        made.source = source
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Lets through what asks for no numbers."""
        owner = getattr(func, "__self__", None)  # a property's own name stands in its getter
        name = getattr(owner, "__name__", "") if func.__name__ == "__get__" else func.__name__
        if name not in _TOLD:
            raise UnsupportedError(
                f"--max-memory: {name} is computed with weights outside the block that they belong to; {_WITHOUT}"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


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
            param = nn.Parameter(param.detach().to("meta"), param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = registered
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def stream(
    model: nn.Module, stored: Mapping[str, tuple[Path, str]], dtype: torch.dtype, prefix: str, budget: Budget
) -> tuple[str, ...]:
    """Let a hollow model read its weights while it runs.

    Args:
        model: built under `hollow_parameters`.
        stored: (file, name in it) of each tensor of the checkpoint, by the model's name for it.
        dtype: what floating-point weights are to be in. prefix: what names in the checkpoint may have or lack in front.
        budget: looked at whenever weights come.

    Returns:
        The tensors of the checkpoint that the model has no use for.

    Raises:
        UnsupportedError: the checkpoint has parameters under other names, or not at all.
        LoadError: shapes differ, or it cannot fit.
    """
    sources = _sources(model, stored, dtype, prefix)
    _put_away(model, sources)
    residents, units = _units(model)
    budget.require(residents.bytes + max((unit.bytes for unit in units), default=0), "its largest block needs")
    used = set()
    for name, buffer in model.named_buffers():
        if (key := _key(name, stored, prefix)) is not None:
            used.add(key)
            buffer.data = Source(*stored[key], dtype if buffer.is_floating_point() else None).read()
    _Coming(residents, budget).load()
    for unit in units:
        coming = _Coming(unit, budget)
        unit.module.register_forward_pre_hook(coming.enter, prepend=True)
        unit.module.register_forward_hook(coming.leave, always_call=True)
    used |= {_key(name, stored, prefix) for name, _ in model.named_parameters(remove_duplicate=False)}
    return tuple(key for key in stored if key not in used)


def values(parameter: Tensor) -> Tensor:
    """The numbers of a parameter, read for the occasion if it is not in memory."""
    return parameter.source.read() if isinstance(parameter, Away) else parameter


@dataclass
class _Coming:
    """The hooks of a unit."""

    unit: Unit
    budget: Budget
    running: int = 0
    away: list[tuple[nn.Module, str, nn.Parameter]] = field(default_factory=list)

    def enter(self, _module: nn.Module, _args: Any) -> None:
        """Before the unit runs."""
        self.running += 1
        if self.running == 1:
            self.load()

    def leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        """After it, also if it raised, before `enter` even."""
        self.running = max(0, self.running - 1)
        if self.running == 0 and self.away:
            for module, name, parameter in self.away:
                module._parameters[name] = parameter
            self.away.clear()
            give_back()

    def load(self) -> None:
        """Put the numbers in place of the hollow parameters."""
        loaded: dict[int, nn.Parameter] = {}
        for module, name in self.unit.slots:
            away = module._parameters[name]
            assert isinstance(away, Away)
            if id(away) not in loaded:
                loaded[id(away)] = nn.Parameter(away.source.read(), away.requires_grad)  # which torch chooses its ways by
            self.away.append((module, name, away))
            module._parameters[name] = loaded[id(away)]
        self.budget.look(self.unit.name or "the model itself")


def _units(model: nn.Module) -> tuple[Unit, list[Unit]]:
    """What stays in memory, and what comes and goes: the entries of lists of blocks, and modules beside those lists."""
    staying: list[tuple[nn.Module, str]] = []
    units: list[Unit] = []

    def visit(name: str, module: nn.Module) -> None:
        if name and not _is_list(module) and not any(map(_is_list, module.modules())):
            units.append(_unit(name, module))
            return
        # Own parameters of what holds the blocks are used by code that runs between them.
        staying.extend((module, own) for own, parameter in module._parameters.items() if parameter is not None)
        for child_name, child in module.named_children():
            if _is_list(module) and not isinstance(child, (nn.ParameterList, nn.ParameterDict)):
                units.append(_unit(f"{name}.{child_name}", child))
            else:
                visit(f"{name}.{child_name}" if name else child_name, child)

    visit("", model)
    return Unit("", model, tuple(staying)), [unit for unit in units if unit.slots]


def _is_list(module: nn.Module) -> bool:
    """Whether its children are called and it is not; parametrisations are a list too, and are part of what they belong to."""
    lists = (nn.ModuleList, nn.ParameterList, nn.ParameterDict)
    return isinstance(module, lists) and not isinstance(module, ParametrizationList)


def _unit(name: str, module: nn.Module) -> Unit:
    slots = [(inner, own) for inner in module.modules() for own, value in inner._parameters.items() if value is not None]
    return Unit(name, module, tuple(slots))


def _sources(model: nn.Module, stored: Mapping[str, tuple[Path, str]], dtype: torch.dtype, prefix: str) -> dict[int, Source]:
    sources: dict[int, Source] = {}
    lacking: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in sources:
            continue
        key = _key(name, stored, prefix)
        if key is None:
            lacking.setdefault(id(parameter), name)
            continue
        source = Source(*stored[key], dtype if parameter.is_floating_point() else None)
        if (shape := _shape(source)) != list(parameter.shape):
            raise LoadError(f"{source.file}: {source.key!r} has shape {shape}, and config.json asks for {list(parameter.shape)}")
        sources[id(parameter)] = source
    missing = [name for which, name in lacking.items() if which not in sources]
    if missing:
        raise UnsupportedError(
            f"--max-memory: the files have no tensor for {len(missing)} parameters under their own names, such as "
            f"{missing[0]}: they are lacking, or have to be converted, which is not done block by block; {_WITHOUT}"
        )
    return sources


def _put_away(model: nn.Module, sources: Mapping[int, Source]) -> None:
    away: dict[int, Away] = {}  # one for each parameter, so that those that are shared stay so
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                which = id(parameter)
                away.setdefault(which, Away.of(parameter, sources[which]))
                module._parameters[name] = away[which]


def _key(name: str, stored: Mapping[str, tuple[Path, str]], prefix: str) -> str | None:
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
