"""Turns what the user named into a module: a folder, a Hub id, `package.module:factory`, or a module itself."""

import importlib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attemper.checker.folder import open_checkpoint, path_of
from attemper.checker.options import Options, one_line
from attemper.errors import AttemperError, LoadError, UnsupportedError

EXAMPLE = "attemper.examples:unscaled"
_OF_ATEN = type(torch.ops.aten.add.Tensor)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Subject:
    """A model to check.

    Attributes:
        model: the module; name: what to call it in the report.
        config: its Hugging Face configuration, or None.
        folder: where it was read from (its tokenizer is there as well), or None.
        missing: names of parameters that the checkpoint does not hold, so that they are random.
        notes: what a reader of the report should know.
    """

    model: nn.Module
    name: str
    config: Any = None
    folder: Path | None = None
    missing: frozenset[str] = field(default=frozenset())
    notes: tuple[str, ...] = ()


def load(model: "str | os.PathLike[str] | nn.Module | None", options: Options) -> Subject:
    """The model that was asked for, or the unscaled example where none was.

    Raises:
        LoadError: it cannot be found or read, or is unsafe to read.
        MissingExtraError: an optional package is needed.
        UnsupportedError: the module does not run in Python.
    """
    if isinstance(model, nn.Module):
        return _as_built(model, type(getattr(model, "_orig_mod", model)).__name__, options)
    if model is None:
        return _from_factory(EXAMPLE, options)
    if isinstance(model, os.PathLike):
        return _from_folder(path_of(os.fspath(model)), os.fspath(model), options)
    if not isinstance(model, str):
        raise LoadError(
            f"model: got {type(model).__name__}; expected a torch.nn.Module, a folder, a Hub id or package.module:factory"
        )
    path = path_of(model)
    if path.exists():
        return _from_folder(path, str(path), options)
    if names_factory(model):
        return _from_factory(model, options)
    if _HUB_ID.fullmatch(model):
        from attemper.checker.pretrained import fetch

        folder = fetch(model, options)
        return _from_folder(folder, f"{model}@{folder.name[:12]}", options)
    raise LoadError(f"{model}: no such folder; expected a folder, a Hub id such as org/name, or package.module:factory")


def names_factory(model: "str | os.PathLike[str] | None") -> bool:
    """Whether this is package.module:factory, and no folder of that name; without a name it is the example's."""
    if model is None or not isinstance(model, str):
        return model is None
    return ":" in model and not model.startswith((".", "/", "~")) and not path_of(model).exists()


def import_callable(spec: str, what: str) -> Callable[..., Any]:
    """The callable that `package.module:name` names; the current directory is importable.

    Raises:
        LoadError: no such module or name, or importing it failed.
    """
    module_name, _, name = spec.partition(":")
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except AttemperError:
        raise
    except (Exception, SystemExit) as error:  # a script without a guard ends the process when it is imported
        raise LoadError(f"{what} {spec!r} could not be imported: {one_line(error)}") from error
    finally:
        if added and here in sys.path:
            sys.path.remove(here)
    if not callable(found):
        raise LoadError(f"{what} {spec!r} is {type(found).__name__}; expected a function, as package.module:name")
    return found


def call_foreign(function: Callable[[], Any], failed: str) -> Any:
    """What a function of the user's returns.

    Args:
        failed: how to say that it failed, such as "factory 'a:b' failed".

    Raises:
        LoadError: it raised, or tried to end the process, whose exit code would then pass for ours.
    """
    try:
        return function()
    except AttemperError:
        raise
    except (Exception, SystemExit) as error:
        raise LoadError(f"{failed}: {one_line(error)}") from error


def _from_factory(spec: str, options: Options) -> Subject:
    model = call_foreign(import_callable(spec, "factory"), f"factory {spec!r} failed when called without arguments")
    if not isinstance(model, nn.Module):
        raise LoadError(f"factory {spec!r} returned {type(model).__name__}; expected a torch.nn.Module")
    return _as_built(model, spec, options, own=True)


def _from_folder(folder: Path, name: str, options: Options) -> Subject:
    checkpoint = open_checkpoint(folder, allow_pickle=options.allow_pickle)
    from attemper.checker.pretrained import read

    model, missing, notes = read(checkpoint, options)
    return Subject(model, name, model.config, folder, missing, notes)


def _as_built(model: nn.Module, name: str, options: Options, *, own: bool = False) -> Subject:
    if options.max_memory is not None:
        raise UnsupportedError(f"--max-memory: {name} is built already, with all its weights; it applies to folders and Hub ids")
    inner = getattr(model, "_orig_mod", None)  # torch.compile wraps; a capture runs the module inside eagerly anyway
    if isinstance(inner, nn.Module):
        model = inner
    if isinstance(model, torch.jit.ScriptModule) or any(_is_exported(module) for module in model.modules()):
        raise UnsupportedError(
            f"{name} comes from TorchScript or torch.export, whose calls cannot be seen; expected the module it was made from"
        )
    config = getattr(model, "config", None)
    config = config if hasattr(config, "model_type") else None
    hollow = next((key for key, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta), None)
    if hollow is not None:
        raise LoadError(f"{name} holds no numbers in {hollow} (device meta); expected a model whose weights are loaded")
    notes: list[str] = []
    wanted = options.torch_dtype
    if wanted is not None and any(p.dtype != wanted for p in model.parameters() if p.is_floating_point()):
        if not own:
            raise LoadError(
                f"dtype: got {options.dtype!r} for a module; expected one that is already in it: convert a copy yourself"
            )
        model = model.to(wanted)
        notes.append(f"converted to {options.dtype} after it was built, buffers included")
    return Subject(model, name, config, None, notes=tuple(notes))


def _is_exported(module: nn.Module) -> bool:
    """Whether it calls ATen's operators, as what torch.export makes does; symbolic tracing keeps the functions of Python."""
    return isinstance(module, torch.fx.GraphModule) and any(isinstance(node.target, _OF_ATEN) for node in module.graph.nodes)
