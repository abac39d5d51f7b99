"""Holds the dtypes in weight files against the model's: integers where it computes with floats are read as huge numbers.

A file may say of 32 bits that they are an integer where a float was meant; what reads it converts the number, and goes on.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from attemper.checker.folder import Checkpoint, weight_files
from attemper.checker.streaming import tensors_of
from attemper.errors import LoadError

_FLOATS = ("F", "BF", "C")  # how safetensors' names of what is no integer begin


def refuse_integers(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that is not quantised and holds integers for a parameter of floats.

    Raises:
        LoadError: it names the tensor, its dtype and the parameter's.
    """
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    for key, dtype in _integers(checkpoint):
        found = next((named[name] for name in (key, prefix + key, key.removeprefix(prefix)) if name in named), None)
        # A name that is converted when it is read belongs to no parameter; of these only weights are surely meant as floats.
        if found.is_floating_point() if found is not None else key.endswith(".weight"):
            wanted = str(found.dtype).removeprefix("torch.") if found is not None else "floats"
            raise LoadError(
                f"{checkpoint.folder}: the weight files hold {key} as integers ({dtype}), and {type(model).__name__} computes "
                f"with {wanted}; expected floats, or a quantization_config in config.json that says what the integers mean"
            )


def _integers(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """(name, dtype) of each tensor that holds no floats."""
    if checkpoint.pickled:
        for file in weight_files(checkpoint):
            held: Any = torch.load(file, map_location="meta", weights_only=True)
            for key, tensor in held.items():
                if isinstance(tensor, torch.Tensor) and not (tensor.is_floating_point() or tensor.is_complex()):
                    yield key, str(tensor.dtype).removeprefix("torch.")
        return
    from safetensors import safe_open

    for file in checkpoint.files:
        keys = [key for key, _ in tensors_of((file,))]
        with safe_open(file, framework="pt", device="cpu") as stored:
            for key in keys:
                dtype = stored.get_slice(key).get_dtype()
                if not dtype.startswith(_FLOATS):
                    yield key, dtype
