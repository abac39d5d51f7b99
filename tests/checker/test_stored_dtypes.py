"""Files that say integer where the model computes with floats are refused; quantisation that nobody knows is told."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import attemper
from attemper.errors import LoadError

WEIGHT = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(llama_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama_folder, tmp_path / "model"))


def relabel(file: Path, key: str, dtype: str) -> None:
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    assert header[key]["dtype"] == "F32"
    header[key]["dtype"] = dtype
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def configure(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("dtype", ["I32", "U32"])
@pytest.mark.parametrize("settings", [{}, {"max_memory": 10**12}, {"weights_only": True}])
def test_a_label_that_lies(folder: Path, dtype: str, settings: dict[str, Any]) -> None:
    relabel(folder / "model.safetensors", WEIGHT, dtype)
    with pytest.raises(LoadError, match=rf"hold {WEIGHT} as integers \({dtype}\), and LlamaForCausalLM computes with float32"):
        attemper.check(folder, **settings)


def test_without_the_prefix_of_the_head(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = {key.removeprefix("model."): tensor for key, tensor in load_file(file).items() if key != "lm_head.weight"}
    save_file(tensors, file, {"format": "pt"})
    configure(folder, architectures=["LlamaModel"])
    attemper.check(folder)
    relabel(file, WEIGHT.removeprefix("model."), "I32")
    with pytest.raises(LoadError, match=r"hold layers\.1\.self_attn\.q_proj\.weight as integers"):
        attemper.check(folder)


def test_pickle(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    attemper.check(folder, allow_pickle=True)
    torch.save(tensors | {WEIGHT: tensors[WEIGHT].view(torch.int32)}, folder / "pytorch_model.bin")
    with pytest.raises(LoadError, match=rf"hold {WEIGHT} as integers \(int32\)"):
        attemper.check(folder, allow_pickle=True)


def test_integers_that_are_meant_as_such(folder: Path) -> None:
    """Such as the causal masks and positions that older checkpoints keep, which nothing reads."""
    file = folder / "model.safetensors"
    more = {"model.layers.0.attn.bias": torch.ones(3, 3, dtype=torch.uint8), "model.position_ids": torch.arange(5)}
    save_file(load_file(file) | more, file, {"format": "pt"})
    assert any("2 tensors of the checkpoint are not used" in note for note in attemper.check(folder).notes)


def test_quantisation_that_nobody_knows_is_told_and_changes_nothing(folder: Path) -> None:
    configure(folder, quantization_config={"quant_method": "../x"})
    assert any("names the quantisation '../x', which transformers does not know" in note for note in attemper.check(folder).notes)
    relabel(folder / "model.safetensors", WEIGHT, "I32")
    with pytest.raises(LoadError, match=rf"hold {WEIGHT} as integers"):
        attemper.check(folder)
