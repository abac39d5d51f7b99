"""Writes the edited checkpoint as a new folder, whole or not at all.

- the model's own folder is never opened for writing, and nothing appears under the name that was asked for until it is complete;
- every tensor that was not edited keeps its bits, its dtype and its shard; a shard without edits is copied;
- what holds the old weights in another form (pickle, optimiser states, exports) is left out, and named.
"""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attemper.checker.folder import CONFIG, Checkpoint, read_json, weight_files
from attemper.checker.remedies.records import Changed
from attemper.errors import ArgumentError, LoadError, MissingExtraError, UnsupportedError
from attemper.files import flush_folder, name_beside
from attemper.weights import Edit

_OTHER_WEIGHTS = frozenset(
    (".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".pickle", ".pkl", ".pt", ".pth", ".safetensors")
)
_INDEX = "model.safetensors.index.json"


def check_out(out: Path, model: Path) -> None:
    """Refuse a place where nothing may be written.

    Raises:
        ArgumentError: it exists and is not an empty folder, lies in the model's folder, or its parent is missing.
    """
    real, source = out.resolve(), model.resolve()
    if real == source or real.is_relative_to(source):
        raise ArgumentError("out", str(out), f"a folder outside the model's own, {model}, which is never written to")
    if out.is_symlink() or (out.exists() and not out.is_dir()) or (out.is_dir() and any(out.iterdir())):
        raise ArgumentError("out", f"{out}, which exists", "a new folder, or an empty one")
    if not real.parent.is_dir():
        raise ArgumentError("out", f"{out}, whose parent does not exist", "a new folder in one that exists")


@contextlib.contextmanager
def appearing(out: Path) -> Generator[Path]:
    """A hidden folder beside `out`, which becomes `out` at the end, and is removed where anything went wrong."""
    real = out.resolve()
    partial = name_beside(real, "partial")
    partial.mkdir()
    try:
        yield partial
        _flush(partial)
        partial.replace(real)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    flush_folder(real.parent)


def write(
    checkpoint: Checkpoint,
    into: Path | None,
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    edits: tuple[Edit, ...],
    settings: tuple[tuple[str, Any, Any], ...],
) -> tuple[tuple[Changed, ...], tuple[str, ...]]:
    """Write the checkpoint with other values of some parameters.

    Args:
        into: an empty folder; None: go through it all and write nothing.
        before, after: those parameters of the model, by name, as they were and as they are; edits: what was done to them.
        settings: of config.json.

    Returns:
        What was changed in the weights, and names of files that were left out.

    Raises:
        UnsupportedError: a parameter is not stored as the model holds it, or would overflow in the dtype of its file.
        LoadError: a file of the folder cannot be copied. MissingExtraError: safetensors is not installed.
    """
    files = weight_files(checkpoint)
    left_out: tuple[str, ...] = ()
    if into is not None:
        left_out = _copy_others(checkpoint.folder, into, {file.name for file in files})
        _write_config(checkpoint.folder / CONFIG, into / CONFIG, settings)
    pending = dict(before)
    records: list[Changed] = []
    shards: dict[str, str] = {}
    for file in files:
        here = _places(_names(file, pickled=checkpoint.pickled), pending)
        name = f"{file.stem.replace('pytorch_model', 'model')}.safetensors" if checkpoint.pickled else file.name
        if not here and not checkpoint.pickled:
            if into is not None:
                shutil.copyfile(file, into / name)
            continue
        tensors, metadata = _read(file, pickled=checkpoint.pickled)
        for stored, parameter in here.items():
            done = [edit for edit in edits if edit.parameter == parameter]
            old = tensors[stored]
            tensors[stored], record = _edited(stored, old, pending.pop(parameter), after[parameter], done)
            if not torch.equal(old, tensors[stored]):  # a bias of zeros is what it was
                records.append(record)
        if into is not None:
            _save(tensors, into / name, metadata)
        shards |= dict.fromkeys(tensors, name)
    if pending:
        raise UnsupportedError(
            f"{next(iter(pending))} is not stored under its name in the weights: edit the model in Python and save it yourself"
        )
    if checkpoint.pickled and len(files) > 1 and into is not None:
        (into / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": shards}, indent=2) + "\n", "utf-8")
    return tuple(records), left_out


def changed(before: Mapping[str, Tensor], after: Mapping[str, Tensor], edits: tuple[Edit, ...]) -> tuple[Changed, ...]:
    """What was changed in a model that is in no file; the arguments are those of `write`.

    Raises:
        UnsupportedError: a parameter would overflow in its dtype.
    """
    return tuple(
        _edited(name, old, old, after[name], [edit for edit in edits if edit.parameter == name])[1]
        for name, old in before.items()
        if not torch.equal(old, after[name])
    )


def _copy_others(source: Path, into: Path, weights: set[str]) -> tuple[str, ...]:
    left_out = []
    for place, folders, files in os.walk(source):
        inside = Path(place).relative_to(source)
        for name in folders:
            if (Path(place) / name).is_symlink():
                raise LoadError(f"{Path(place) / name} is a link to a folder; expected files and folders of the model itself")
            (into / inside / name).mkdir()
        for name in files:
            file = Path(place) / name
            if str(inside / name) in (*weights, CONFIG):
                continue
            index = name.endswith(".index.json") and Path(name.removesuffix(".index.json")).suffix in _OTHER_WEIGHTS
            if (file.suffix in _OTHER_WEIGHTS or index) and not (name == _INDEX and weights != {"model.safetensors"}):
                left_out.append(str(inside / name))
                continue
            if not file.is_file() or (inside.parts and file.is_symlink()):
                raise LoadError(f"{file} is not a regular file; expected files and folders of the model itself")
            shutil.copyfile(file, into / inside / name)
    return tuple(sorted(left_out))


def _write_config(source: Path, into: Path, settings: tuple[tuple[str, Any, Any], ...]) -> None:
    if not settings:
        shutil.copyfile(source, into)
        return
    config = read_json(source)
    text = config.get("text_config")
    part = text if isinstance(text, dict) else config
    part |= {name: new for name, _, new in settings}
    into.write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def _places(stored: list[str], wanted: Mapping[str, Tensor]) -> dict[str, str]:
    """Which tensor of a file holds which parameter: names differ at most by the prefix of a head's or a base model's."""
    found = {}
    for parameter in wanted:
        fitting = [name for name in stored if name == parameter or _one_ends(name, parameter)]
        if parameter in fitting:
            found[parameter] = parameter
        elif len(fitting) == 1:
            found[fitting[0]] = parameter
    return found


def _one_ends(a: str, b: str) -> bool:
    return a.endswith("." + b) or b.endswith("." + a)


def _edited(name: str, stored: Tensor, before: Tensor, after: Tensor, edits: list[Edit]) -> tuple[Tensor, Changed]:
    if stored.shape != before.shape or not torch.equal(stored.to(before.dtype), before):
        raise UnsupportedError(
            f"{name} is stored otherwise than the model holds it: edit the model in Python and save it yourself"
        )
    new = after.to(stored.dtype)
    if not bool(new.isfinite().all()):
        largest = torch.finfo(stored.dtype).max
        raise UnsupportedError(
            f"{name} would hold {float(after.abs().max()):.5g}, beyond {largest:.5g}, the largest of its dtype"
        )
    # A number that was not multiplied keeps its bits: every 16-bit number is a float32.
    ideal = after.double()
    errors = ((new.double() - ideal).abs() / ideal.abs())[ideal != 0]
    error = float(errors.max()) if errors.numel() else 0.0
    dtype = str(stored.dtype).removeprefix("torch.")
    least = math.prod(min(edit.factors) for edit in edits)
    return new, Changed(name, dtype, least, sum(edit.rounding for edit in edits) + error)


def _names(file: Path, *, pickled: bool) -> list[str]:
    if pickled:
        return list(_read(file, pickled=True)[0])
    safe_open, _ = _safetensors()
    with safe_open(file, framework="pt") as stream:
        return list(stream.keys())


def _read(file: Path, *, pickled: bool) -> tuple[dict[str, Tensor], dict[str, str]]:
    if pickled:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
            raise LoadError(f"{file} holds more than tensors; convert it to safetensors yourself")
        # Each on memory of its own, which safetensors asks for.
        return {name: value.contiguous().clone() for name, value in loaded.items()}, {"format": "pt"}
    safe_open, _ = _safetensors()
    with safe_open(file, framework="pt") as stream:
        return {name: stream.get_tensor(name) for name in stream.keys()}, stream.metadata() or {}  # noqa: SIM118 - no mapping


def _save(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str]) -> None:
    _, save_file = _safetensors()
    save_file(tensors, file, metadata=metadata)


def _safetensors() -> tuple[Any, Any]:
    try:
        from safetensors import safe_open
        from safetensors.torch import save_file
    except ImportError:
        raise MissingExtraError("safetensors", "hf", "write a checkpoint") from None
    return safe_open, save_file


def _flush(folder: Path) -> None:
    for place, _, files in os.walk(folder):
        for name in files:
            with (Path(place) / name).open("rb") as stream:
                os.fsync(stream.fileno())
        flush_folder(Path(place))
