"""Where models come from: the Hub, code of their own, factories."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

import attemper
from attemper.checker.load import load
from attemper.checker.options import Options
from attemper.errors import LoadError, UnsupportedError
from tests import checkpoints

REMOTE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

Path({witness!r}).touch()

class Mine(LlamaConfig):
    model_type = "mine-of-attemper"

class MineForCausalLM(LlamaForCausalLM):
    config_class = Mine
"""


class TestModules:
    def test_a_compiled_one_is_the_one_inside(self) -> None:
        report = attemper.check(torch.compile(checkpoints.llama(), backend="eager"))
        assert report.model == "LlamaForCausalLM"
        assert report.rows[0].module == "model.layers.0.self_attn"

    def test_a_path(self, tmp_path: Path) -> None:
        folder = checkpoints.save(checkpoints.llama(), tmp_path)
        assert attemper.check(folder).model == str(folder)

    def test_one_without_numbers(self) -> None:
        with torch.device("meta"):
            hollow = torch.nn.MultiheadAttention(20, 5)
        with pytest.raises(LoadError, match="MultiheadAttention holds no numbers in in_proj_weight"):
            attemper.check(hollow, torch.ones(3, 2, 20))

    @pytest.mark.parametrize("made", [torch.jit.script, torch.jit.trace, torch.export.export], ids=lambda made: made.__name__)
    @pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
    def test_one_that_does_not_run_in_python(self, made: Callable[..., Any]) -> None:
        x = torch.ones(2, 3)
        model = torch.nn.Linear(3, 5).eval()
        given = made(model) if made is torch.jit.script else made(model, (x,))
        given = given.module() if made is torch.export.export else given
        with pytest.raises(UnsupportedError, match=r"comes from TorchScript or torch\.export, .*; expected the module it"):
            attemper.check(given, x)

    def test_one_with_a_part_that_was_exported(self) -> None:
        x = torch.ones(2, 3)
        part = torch.export.export(torch.nn.Linear(3, 5), (x,)).module()
        with pytest.raises(UnsupportedError, match=r"Sequential comes from .* torch\.export"):
            attemper.check(torch.nn.Sequential(part), x)

    def test_one_that_was_traced_symbolically(self) -> None:
        class Plain(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.nn.functional.scaled_dot_product_attention(x, x, x)

        assert len(attemper.check(torch.fx.symbolic_trace(Plain()), torch.randn(1, 2, 7, 5)).rows) == 1


class TestRemoteCode:
    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        from transformers import dynamic_module_utils

        monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
        folder = checkpoints.save(checkpoints.llama(), tmp_path / "brought")
        config = json.loads((folder / "config.json").read_text())
        config |= {
            "model_type": "mine-of-attemper",
            "architectures": ["MineForCausalLM"],
            "auto_map": {"AutoConfig": "own.Mine", "AutoModelForCausalLM": "own.MineForCausalLM"},
        }
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "own.py").write_text(REMOTE.format(witness=str(tmp_path / "ran")))
        return folder

    def test_it_is_not_run(self, folder: Path) -> None:
        with pytest.raises(LoadError, match="--trust-remote-code"):
            attemper.check(str(folder))
        assert not (folder.parent / "ran").exists()

    def test_it_is_run_where_it_is_trusted(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(str(folder.parent / "modules"))
        report = attemper.check(str(folder), trust_remote_code=True)
        assert (folder.parent / "ran").exists()
        assert len(report.rows) == checkpoints.LAYERS
        assert "code that the checkpoint brings along was run (--trust-remote-code)" in report.notes


class TestHub:
    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch, llama_folder: Path) -> list[dict[str, Any]]:
        asked: list[dict[str, Any]] = []

        def download(repository: str, **options: Any) -> str:
            asked.append({"repository": repository} | options)
            return str(llama_folder)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        return asked

    def test_only_what_is_needed_is_fetched(self, asked: list[dict[str, Any]]) -> None:
        subject = load("org/name", Options())
        assert subject.name == "org/name@model"
        assert len(asked) == 1
        assert asked[0]["repository"] == "org/name"
        assert not {"*.py", "*.bin", "pytorch_model*.bin"} & set(asked[0]["allow_patterns"])

    def test_code_only_where_it_is_trusted(self, asked: list[dict[str, Any]]) -> None:
        load("org/name", Options(trust_remote_code=True))
        assert "*.py" in asked[0]["allow_patterns"]

    def test_it_cannot_be_reached(self) -> None:
        with pytest.raises(LoadError, match="org/name: no such folder here, and not to be had from the Hugging Face Hub"):
            load("org/name", Options())

    def test_a_folder_of_that_name_goes_first(
        self, asked: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        checkpoints.config_only(tmp_path / "org" / "name")
        monkeypatch.chdir(tmp_path)
        with pytest.raises(LoadError, match="org/name has no weights"):
            load("org/name", Options())
        assert not asked


class TestNotes:
    def test_random_heads_and_unused_tensors_are_told(self, tmp_path: Path) -> None:
        folder = checkpoints.save(checkpoints.bert(), tmp_path)
        config = json.loads((folder / "config.json").read_text()) | {"architectures": ["BertForSequenceClassification"]}
        (folder / "config.json").write_text(json.dumps(config))
        notes = " ".join(attemper.check(str(folder)).notes)
        assert "parameters are not in the checkpoint and are random: bert.pooler.dense.bias" in notes

    def test_a_random_embedding_is_refused(self, tmp_path: Path) -> None:
        folder = checkpoints.save(checkpoints.llama(), tmp_path)
        weights = checkpoints.llama().state_dict()
        del weights["model.embed_tokens.weight"]
        checkpoints.tensors(folder / "model.safetensors", **weights)
        with pytest.raises(LoadError, match=r"\(1 parameters, such as model\.embed_tokens\.weight\)"):
            attemper.check(str(folder))

    def test_a_factory_model_is_converted_where_that_is_asked_for(self) -> None:
        report = attemper.check("attemper.examples:scaled", dtype="bfloat16")
        assert report.dtype == "bfloat16"
        assert any("converted to bfloat16 after it was built" in note for note in report.notes)

    def test_something_else(self) -> None:
        with pytest.raises(LoadError, match=r"model: got Tensor; expected a torch\.nn\.Module"):
            load(torch.zeros(3), Options())  # pyrefly: ignore
