"""Example weights on disk: one safetensors file, float16, with the provenance in its header.

A safetensors file is numbers and a JSON header, so that reading one cannot run code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from attemper.errors import LoadError, MissingExtraError, in_one_line
from attemper.examples.decoder import Decoder
from attemper.examples.provenance import Provenance

REMEDY = "install attemper again, or train the examples with: attemper lab run examples --out DIR"
# One key: the header's keys come in no fixed order, and the same weights should be the same file.
METADATA_KEY = "provenance"


def load(path: Path) -> Decoder:
    """The model whose weights are in a file that `save` wrote.

    Args:
        path: a .safetensors file.

    Returns:
        the model in eval mode, its weights widened from float16 to float32, its `provenance` set.

    Raises:
        LoadError: there is no such file, or it is damaged, or it holds something else.
        MissingExtraError: safetensors is not installed.
    """
    safetensors = _safetensors()
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            provenance = Provenance.from_json((file.metadata() or {}).get(METADATA_KEY, "null"))
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
        model = Decoder(provenance.scale)
        model.load_state_dict(tensors)
    except FileNotFoundError:
        raise LoadError(f"{path}: no such file; expected the weights of an example model; {REMEDY}") from None
    except (OSError, RuntimeError, TypeError, ValueError, safetensors.SafetensorError) as error:
        cause = in_one_line(error)[:160]
        raise LoadError(f"{path}: not the weights of an example model ({cause}); {REMEDY}") from error
    model.provenance = provenance
    return model.eval()


def save(model: Decoder, path: Path, provenance: Provenance) -> None:
    """Writes a model's weights as float16, with their provenance.

    Args:
        model: what was trained.
        path: the file to write, over an earlier one too.
        provenance: goes into the file's header.

    Raises:
        MissingExtraError: safetensors is not installed.
    """
    safetensors = _safetensors()
    tensors = {name: tensor.to(torch.float16).contiguous() for name, tensor in model.state_dict().items()}
    # Not save_file, which makes a file that only its owner may read: a package built from it would be unusable for others.
    path.write_bytes(safetensors.torch.save(tensors, metadata={METADATA_KEY: provenance.to_json()}))


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        raise MissingExtraError("safetensors", "examples", "read and write the example models") from None
    return safetensors
