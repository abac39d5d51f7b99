"""Checkpoints that are read block by block: the same figures, less memory, and a clear word where it cannot be done."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import attemper
from attemper.checker.budget import Budget, in_words, resident, size
from attemper.checker.streaming import Away, Source, hollow_parameters
from attemper.errors import ArgumentError, LoadError, UnsupportedError
from attemper.report import Report
from tests import checkpoints
from tests.capture.architectures import build
from tests.running import run

NOTE = "the weights were read from disk block by block, to keep within --max-memory"
PLENTY = "900GB"


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Report]:
    """A check that streams however much room there is."""

    def check(folder: Path, *given: Any, **options: Any) -> Report:
        with monkeypatch.context() as patch:
            patch.setattr(Budget, "room_for_all", lambda _self, _weights: False)
            return attemper.check(folder, *given, **{"max_memory": PLENTY} | options)

    return check


def same(ordinary: Report, by_block: Report) -> None:
    first, second = ordinary.to_dict(), by_block.to_dict()
    notes = second["notes"]
    assert notes.count(NOTE) == 1
    notes.remove(NOTE)
    assert json.dumps(first) == json.dumps(second)


class TestSameFigures:
    @pytest.mark.parametrize(
        "name",
        [
            "llama",  # rotary frequencies are buffers outside the state dict
            "gpt2",  # masks are buffers, the head is tied to the embedding
            "t5",  # encoder and decoder share an embedding; position biases
            "llama4",  # sends its ids to where the embedding is
            "siglip",  # nn.MultiheadAttention reads its projections' weights without calling them
            "vit",  # tensors have other names in the file
            "wav2vec2",  # a convolution with a parametrised weight
        ],
    )
    def test_bit_for_bit(self, tmp_path: Path, streamed: Callable[..., Report], name: str) -> None:
        model, inputs = build(name)
        model.save_pretrained(tmp_path, max_shard_size="20KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
        same(attemper.check(tmp_path, inputs), streamed(tmp_path, inputs))

    @pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("dtype", [None, "auto", "bfloat16", "float16"])
    def test_whatever_it_is_computed_in(
        self, tmp_path: Path, streamed: Callable[..., Report], stored: torch.dtype, dtype: str | None
    ) -> None:
        folder = checkpoints.save(checkpoints.llama(tie_word_embeddings=True).to(stored), tmp_path)
        same(attemper.check(folder, dtype=dtype), streamed(folder, dtype=dtype))

    def test_findings_too(self, tmp_path: Path, streamed: Callable[..., Report]) -> None:
        model = checkpoints.llama()
        with torch.no_grad():
            model.model.layers[1].self_attn.q_proj.weight *= 1e5
        folder = checkpoints.save(model, tmp_path)
        by_block = streamed(folder)
        assert {"ATT202", "ATT301"} <= {finding.code for finding in by_block.findings}
        same(attemper.check(folder), by_block)

    def test_a_damaged_weight_is_named(self, tmp_path: Path, streamed: Callable[..., Report]) -> None:
        model = checkpoints.llama()
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[3, 5] = torch.nan
        by_block = streamed(checkpoints.save(model, tmp_path), select="ATT203")
        (finding,) = by_block.findings
        assert "its parameter model.layers.1.mlp.up_proj.weight is itself not finite" in finding.message

    def test_tensors_without_use_are_told(self, tmp_path: Path, streamed: Callable[..., Report]) -> None:
        folder = checkpoints.save(checkpoints.llama(), tmp_path)
        config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 2}
        (folder / "config.json").write_text(json.dumps(config))
        same(attemper.check(folder), streamed(folder))
        assert any(re.match(r"9 tensors of the checkpoint are not used", note) for note in streamed(folder).notes)


MEASURE = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
import attemper
from attemper.checker.budget import resident
from tests import checkpoints

torch.set_num_threads(1)
folder, small, total = sys.argv[1], sys.argv[2], int(sys.argv[3])

def most(**options):
    before = resident()
    with open("/proc/self/clear_refs", "w") as stream:
        stream.write("5")
    report = attemper.check(folder, **options).to_dict()
    with open("/proc/self/status") as status:
        peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    return peak - before, report

attemper.check(small)  # whatever is loaded once is loaded now
by_block, first = most(max_memory=resident() + total // 2)
whole, second = most()
first.pop("notes"), second.pop("notes")
print(json.dumps({"by_block": by_block, "whole": whole, "same": first == second}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process cannot be read here")
def test_less_memory_than_the_weights(tmp_path: Path) -> None:
    model = checkpoints.llama(num_hidden_layers=17, hidden_size=80, intermediate_size=4093)
    folder = checkpoints.save(model, tmp_path / "deep", max_shard_size="10MB")
    total = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert total > 60e6
    small = checkpoints.save(checkpoints.llama(), tmp_path / "small")
    done = json.loads(run(sys.executable, "-c", MEASURE, str(folder), str(small), str(total)).splitlines()[-1])
    assert done["same"]
    assert done["by_block"] < total / 2
    assert done["whole"] > 0.9 * total


class TestRefusals:
    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("mixtral", "tensors of MixtralForCausalLM such as .* are converted when they are loaded"),
            ("deberta_v2", "computed with weights outside the block that they belong to"),
        ],
    )
    def test_models(self, tmp_path: Path, streamed: Callable[..., Report], name: str, words: str) -> None:
        model, inputs = build(name)
        model.save_pretrained(tmp_path)
        with pytest.raises(UnsupportedError, match=words):
            streamed(tmp_path, inputs)

    def test_pickle(self, tmp_path: Path, streamed: Callable[..., Report]) -> None:
        folder = checkpoints.save(checkpoints.llama(), tmp_path)
        torch.save(checkpoints.llama().state_dict(), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        with pytest.raises(UnsupportedError, match="is pickled, and only plain safetensors"):
            streamed(folder, allow_pickle=True)

    def test_parameters_that_are_not_there(self, tmp_path: Path, streamed: Callable[..., Report]) -> None:
        folder = checkpoints.save(checkpoints.llama(), tmp_path)
        config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 4}
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(
            UnsupportedError, match=r"no tensor for 9 parameters under their own names, such as model\.layers\.3\."
        ):
            streamed(folder)

    def test_other_shapes(self, tmp_path: Path, streamed: Callable[..., Report]) -> None:
        folder = checkpoints.save(checkpoints.llama(), tmp_path)
        config = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 47}
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(LoadError, match=r"has shape \[53, 40\], and config.json asks for \[47, 40\]"):
            streamed(folder)

    def test_modules_in_float32(self, tmp_path: Path, streamed: Callable[..., Report]) -> None:
        model, inputs = build("t5")
        model.save_pretrained(tmp_path)
        with pytest.raises(UnsupportedError, match=r"keeps wo in float32, .* use --dtype float32"):
            streamed(tmp_path, inputs, dtype="float16")

    def test_a_module_is_in_memory_already(self) -> None:
        with pytest.raises(UnsupportedError, match="--max-memory: LlamaForCausalLM is built already"):
            attemper.check(checkpoints.llama(), max_memory=PLENTY)

    def test_too_little(self, llama_folder: Path) -> None:
        with pytest.raises(LoadError, match=r"cannot be checked in 1 MB: the process takes .* it needs .* or more, and some for"):
            attemper.check(llama_folder, max_memory="1MB")

    def test_too_little_while_it_runs(self, llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Budget, "require", lambda _self, _amount, _what: None)
        with pytest.raises(LoadError, match=r"the process took .* in the model itself; allow more, or check it on fewer tokens"):
            attemper.check(llama_folder, max_memory=resident() // 2)


def test_with_room_enough_nothing_is_streamed(llama_folder: Path) -> None:
    assert NOTE not in attemper.check(llama_folder, max_memory=PLENTY).notes


class TestAway:
    @pytest.fixture
    def away(self, tmp_path: Path) -> Away:
        file = checkpoints.tensors(tmp_path / "w.safetensors", w=torch.arange(15.0).reshape(3, 5))
        return Away.of(nn.Parameter(torch.empty(3, 5, device="meta")), Source(file, "w", torch.float32))

    def test_it_tells_what_a_tensor_tells(self, away: Away) -> None:
        assert isinstance(away, nn.Parameter)
        assert (away.shape, away.dtype, away.device.type, away.numel()) == ((3, 5), torch.float32, "cpu", 15)
        assert away.is_floating_point()
        assert not away.is_meta
        assert away.requires_grad
        assert torch.equal(away.source.read(), torch.arange(15.0).reshape(3, 5))

    @pytest.mark.parametrize("use", [torch.sum, lambda w: w + 1, lambda w: w[0], lambda w: w.T, lambda w: w.data, float])
    def test_nothing_can_be_computed_with_it(self, away: Away, use: Callable[[Any], Any]) -> None:
        with pytest.raises(UnsupportedError, match=r"--max-memory: .* is computed with weights outside the block"):
            use(away)


def test_buffers_are_real_and_parameters_are_not() -> None:
    register = nn.Module.register_parameter
    with hollow_parameters():
        module = nn.BatchNorm1d(3)
        module.again = module.weight
    assert module.weight.is_meta
    assert module.again is module.weight
    assert module.running_var.tolist() == [1, 1, 1]
    assert nn.Module.register_parameter is register


@pytest.mark.parametrize(
    ("given", "value"),
    [
        (7, 7),
        ("7", 7),
        ("800MB", 800 * 10**6),
        ("1.5 gb", 1_500_000_000),
        ("16GiB", 16 * 2**30),
        (" 2 K ", 2000),
        ("3Ti", 3 * 2**40),
    ],
)
def test_a_size(given: int | str, value: int) -> None:
    assert size(given) == value


@pytest.mark.parametrize("given", ["", "lots", "-3GB", "0", 0, -1, 1.5, True, "1e9", "GB", "9" * 40])
def test_no_size(given: object) -> None:
    with pytest.raises(ArgumentError, match=f"max_memory: got {given!r}; expected a size such as 800MB or 16GiB"):
        size(given)  # pyrefly: ignore


def test_sizes_in_words() -> None:
    assert [in_words(each) for each in (7, 1_250_000, 16 * 10**9)] == ["7 bytes", "1.25 MB", "16 GB"]
    assert 10**7 < resident() < 10**11
