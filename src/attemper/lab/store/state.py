"""A training in the middle: everything that the next step depends on, and what was recorded so far, in one safetensors file.

It is the only file that is written while a run trains, and it is replaced in one act. So whatever kills the process, the file is
there whole, of one moment, and a run that goes on from it gives the curve that it would have given.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attemper.errors import LoadError
from attemper.files import write_whole

FORMAT = "1"


@dataclass
class State:
    """Tensors by name, and what is no tensor.

    Attributes:
        step: the next one.
        tensors: of the model ("model.…"), the optimisers ("optimiser.…"), the generators, and the curves.
        words: JSON: the optimisers' groups and numbers, the loss scale, the evaluations, seconds.
    """

    step: int
    tensors: dict[str, Tensor]
    words: dict[str, Any] = field(default_factory=dict)


def save(path: Path, state: State) -> None:
    """Write it beside its place and move it there."""
    from safetensors.torch import save as to_bytes

    words = {"format": FORMAT, "step": str(state.step), "words": json.dumps(state.words)}
    # Tied weights and views would be refused; each name gets memory of its own.
    tensors = {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in state.tensors.items()}
    write_whole(path, to_bytes(tensors, words))


def load(path: Path, *, tensors: bool = True) -> State:
    """What `save` wrote.

    Args:
        path: the file. tensors: False: without them, to find out where a training stands.

    Raises:
        LoadError: the file is not one of these.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            words = file.metadata() or {}
            if words.get("format") != FORMAT:
                raise LoadError(f"{path}: format {words.get('format')!r}; expected {FORMAT!r}, a checkpoint that the lab wrote")
            found = {name: file.get_tensor(name) for name in file.keys()} if tensors else {}  # noqa: SIM118 (no dictionary)
        return State(int(words["step"]), found, json.loads(words["words"]))
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise LoadError(f"{path}: {error}; expected a checkpoint that the lab wrote; delete it to train the run anew") from error


def pack_optimisers(states: list[dict[str, Any]]) -> tuple[dict[str, Tensor], list[Any]]:
    """The states of optimisers as tensors by name, and the rest as JSON."""
    tensors: dict[str, Tensor] = {}
    words: list[Any] = []
    for place, state in enumerate(states):
        numbers: dict[str, dict[str, Any]] = {}
        for index, slots in state["state"].items():
            for name, value in slots.items():
                if isinstance(value, Tensor):
                    tensors[f"optimiser.{place}.{index}.{name}"] = value
                else:
                    numbers.setdefault(str(index), {})[name] = value
        words.append({"groups": state["param_groups"], "numbers": numbers})
    return tensors, words


def unpack_optimisers(tensors: dict[str, Tensor], words: list[Any]) -> list[dict[str, Any]]:
    """The inverse of `pack_optimisers`."""
    states: list[dict[str, Any]] = [
        {"param_groups": word["groups"], "state": {int(index): dict(slots) for index, slots in word["numbers"].items()}}
        for word in words
    ]
    for name, tensor in tensors.items():
        if name.startswith("optimiser."):
            _, place, index, slot = name.split(".", 3)
            states[int(place)]["state"].setdefault(int(index), {})[slot] = tensor
    return states
