"""Checkpoints are hostile input: each of these is refused with one line that says what is wrong."""

import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import attemper
from attemper.checker import folder as folder_module
from attemper.checker.folder import open_checkpoint, safetensors_elements
from attemper.errors import LoadError
from tests import checkpoints

F32 = {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}


def refused(folder: Path, match: str, **options: Any) -> None:
    with pytest.raises(LoadError, match=match) as caught:
        open_checkpoint(folder, **options)
    assert "\n" not in str(caught.value)


def index(folder: Path, weight_map: Any) -> Path:
    checkpoints.config_only(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


class TestFolder:
    def test_a_sound_one_is_opened(self, llama_folder: Path) -> None:
        opened = open_checkpoint(llama_folder)
        assert not opened.pickled
        assert opened.elements == sum(parameter.numel() for parameter in checkpoints.llama().parameters())
        assert opened.config["model_type"] == "llama"

    def test_missing(self, tmp_path: Path) -> None:
        refused(tmp_path / "nowhere", "nowhere: no such folder")

    def test_a_file(self, tmp_path: Path) -> None:
        refused(
            checkpoints.tensors(tmp_path / "a.safetensors", w=torch.zeros(3)), r"a\.safetensors is a file; expected the folder"
        )

    def test_no_config(self, tmp_path: Path) -> None:
        refused(tmp_path, r"has no config\.json")

    @pytest.mark.parametrize("text", ["{", "[1]", "\xff\xfe", "[" * 100_000, '{"a": 1, "a": 2}'])
    def test_a_damaged_config(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
        refused(tmp_path, r"config\.json (is damaged|gives a name twice)")

    def test_no_weights(self, tmp_path: Path) -> None:
        refused(checkpoints.config_only(tmp_path), r"has no weights: looked for model\.safetensors")

    def test_an_adapter(self, tmp_path: Path) -> None:
        (checkpoints.config_only(tmp_path) / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere"}')
        refused(tmp_path, "holds an adapter")

    def test_a_config_that_names_other_weights(self, tmp_path: Path) -> None:
        refused(checkpoints.config_only(tmp_path, transformers_weights="../other.safetensors"), r"'\.\./other\.safetensors'")

    def test_a_directory_in_place_of_the_weights(self, tmp_path: Path) -> None:
        (checkpoints.config_only(tmp_path) / "model.safetensors").mkdir()
        refused(tmp_path, r"model\.safetensors is not a regular file")

    @pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "vocab.txt"])
    def test_a_link_that_leads_out(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "secret").write_text("{}")
        folder = checkpoints.save(checkpoints.llama(), tmp_path / "model", tokenizer=False)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(tmp_path / "secret")
        refused(folder, f"{name} is a link that leads out of the folder")

    @pytest.mark.parametrize("place", ["templates", "additional_chat_templates/one.jinja"])
    def test_a_link_to_a_folder_or_inside_one_that_leads_out(self, tmp_path: Path, place: str) -> None:
        (tmp_path / "secret").mkdir()
        folder = checkpoints.save(checkpoints.llama(), tmp_path / "model", tokenizer=False)
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / place).symlink_to(tmp_path / "secret")
        refused(folder, f"{place} is a link that leads out of the folder")

    @pytest.mark.parametrize("name", ["generation_config.json", "tokenizer.json", "chat_template.jinja", "vocab.txt"])
    def test_a_file_beside_the_weights_that_is_far_too_large(self, tmp_path: Path, name: str) -> None:
        folder = checkpoints.save(checkpoints.llama(), tmp_path, tokenizer=False)
        with (folder / name).open("wb") as stream:
            stream.truncate(2**33)  # a hole: it takes no room
        refused(folder, f"{name} has 8589934592 bytes")

    @pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "vocab.txt", "model.safetensors.index.json"])
    def test_a_pipe_beside_the_weights_is_never_opened(self, tmp_path: Path, name: str) -> None:
        folder = checkpoints.save(checkpoints.llama(), tmp_path, tokenizer=False)
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        assert attemper.check(str(folder)).exit_code() == 0

    def test_a_name_that_no_file_can_have(self) -> None:
        with pytest.raises(LoadError, match="File name too long"):
            attemper.check("./" + "x" * 5000)

    def test_a_pipe_in_place_of_the_config(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "config.json")
        refused(tmp_path, r"has no config\.json")


class TestShards:
    @pytest.mark.parametrize(
        "name",
        [
            "../out.safetensors",
            "/etc/out.safetensors",
            "sub/out.safetensors",
            "..\\out.safetensors",
            "a\0.safetensors",
            "\x1b[2J.safetensors",
        ],
    )
    def test_names_that_are_not_plain(self, tmp_path: Path, name: str) -> None:
        checkpoints.tensors(tmp_path / "out.safetensors", w=torch.zeros(3))
        refused(index(tmp_path / "model", {"w": name}), "expected a plain file name inside the folder")

    def test_another_suffix(self, tmp_path: Path) -> None:
        refused(index(tmp_path, {"w": "config.json"}), r"'config\.json'; expected file names that end in \.safetensors")

    def test_a_missing_shard(self, tmp_path: Path) -> None:
        refused(index(tmp_path, {"w": "gone.safetensors"}), r"gone\.safetensors does not exist")

    def test_a_link_that_leads_out(self, tmp_path: Path) -> None:
        outside = checkpoints.tensors(tmp_path / "out.safetensors", w=torch.zeros(3))
        folder = index(tmp_path / "model", {"w": "in.safetensors"})
        (folder / "in.safetensors").symlink_to(outside)
        refused(folder, r"in\.safetensors is a link that leads out of the folder")

    def test_a_link_to_itself(self, tmp_path: Path) -> None:
        folder = index(tmp_path / "model", {"w": "in.safetensors"})
        (folder / "in.safetensors").symlink_to(folder / "in.safetensors")
        refused(folder, r"in\.safetensors does not exist")

    def test_links_inside_a_hub_cache_are_followed(self, tmp_path: Path) -> None:
        cache = tmp_path / "models--org--name"
        (cache / "blobs").mkdir(parents=True)
        snapshot = checkpoints.config_only(cache / "snapshots" / "0a1b")
        checkpoints.tensors(cache / "blobs" / "ffff", w=torch.zeros(3))
        (snapshot / "model.safetensors").symlink_to(Path("../../blobs/ffff"))
        assert open_checkpoint(snapshot).elements == 3

    @pytest.mark.parametrize("weight_map", [{}, [], None, {"w": 3}, {"w": None}])
    def test_no_usable_map(self, tmp_path: Path, weight_map: Any) -> None:
        refused(index(tmp_path, weight_map), "no usable weight_map")

    def test_a_map_that_lies(self, tmp_path: Path) -> None:
        folder = index(tmp_path, {"w": "in.safetensors", "absent": "in.safetensors"})
        checkpoints.tensors(folder / "in.safetensors", w=torch.zeros(3))
        refused(folder, "says that in.safetensors holds 'absent', but it does not")

    def test_one_tensor_in_two_shards(self, tmp_path: Path) -> None:
        folder = index(tmp_path, {"w": "a.safetensors", "x": "b.safetensors"})
        checkpoints.tensors(folder / "a.safetensors", w=torch.zeros(3))
        checkpoints.tensors(folder / "b.safetensors", w=torch.ones(3), x=torch.zeros(2))
        refused(folder, r"'w' is in two shards, a\.safetensors and b\.safetensors")

    def test_too_many_tensors(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(folder_module, "MAX_TENSORS", 2)
        refused(index(tmp_path, dict.fromkeys("abc", "in.safetensors")), "lists 3 tensors; at most 2 are accepted")


class TestHeaders:
    @pytest.mark.parametrize(
        ("header", "data", "match"),
        [
            ({"w": F32}, b"\0" * 11, "'w' should end at byte 12 of 11"),
            ({"w": F32}, b"\0" * 13, "has 13 bytes of tensors, its header accounts for 12"),
            ({"w": F32 | {"shape": [4]}}, b"\0" * 12, r"lies about 'w': shape \[4\] of F32 does not fill 12 bytes"),
            ({"w": F32 | {"shape": [2**62, 4]}}, b"\0" * 12, "lies about 'w'"),
            ({"w": F32 | {"dtype": "F31"}}, b"\0" * 12, "cannot be read: 'w'"),
            ({"w": F32 | {"shape": [-3]}}, b"\0" * 12, "cannot be read: 'w'"),
            ({"w": F32 | {"shape": "3"}}, b"\0" * 12, "cannot be read: 'w'"),
            ({"w": F32 | {"data_offsets": [0]}}, b"\0" * 12, "cannot be read: 'w'"),
            ({"w": F32 | {"data_offsets": [12, 0]}}, b"\0" * 12, "'w' should end at byte 0 of 12"),
            ({"w": [1, 2]}, b"\0" * 12, "cannot be read: 'w'"),
            ({"w": F32, "x": F32}, b"\0" * 12, "lies about '[wx]': its bytes begin at 0, expected 12"),
            ({"w": F32 | {"data_offsets": [4, 16]}}, b"\0" * 16, "its bytes begin at 4, expected 0"),
            ({"__metadata__": 3, "w": F32}, b"\0" * 12, "__metadata__ is not an object"),
            ([F32], b"\0" * 12, "should be a JSON object, found list"),
            (b'{"w": 1, "w": 2}', b"", "gives a name twice"),
            (b"not JSON", b"", "cannot be read as JSON"),
            (b"[" * 100_000, b"", "cannot be read as JSON"),
        ],
    )
    def test_a_header_that_lies(self, tmp_path: Path, header: Any, data: bytes, match: str) -> None:
        file = checkpoints.raw_safetensors(tmp_path / "w.safetensors", header, data)
        with pytest.raises(LoadError, match=match):
            safetensors_elements(file)

    @pytest.mark.parametrize("content", [b"", b"\x05\0\0", (2**63).to_bytes(8, "little"), (10**9).to_bytes(8, "little") + b"{}"])
    def test_a_file_that_is_none(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "w.safetensors").write_bytes(content)
        with pytest.raises(LoadError, match=r"is truncated|claims a header of"):
            safetensors_elements(tmp_path / "w.safetensors")

    def test_every_truncation_of_a_sound_file(self, tmp_path: Path) -> None:
        whole = checkpoints.tensors(tmp_path / "w.safetensors", a=torch.zeros(3), b=torch.zeros(2, 2).half()).read_bytes()
        assert safetensors_elements(tmp_path / "w.safetensors") == {"a": 3, "b": 4}
        for length in range(len(whole)):
            (tmp_path / "w.safetensors").write_bytes(whole[:length])
            with pytest.raises(LoadError, match=r"is truncated|should end at byte"):
                safetensors_elements(tmp_path / "w.safetensors")


class TestPickle:
    @staticmethod
    def pickled(folder: Path) -> Path:
        checkpoints.save(checkpoints.llama(), folder)
        torch.save(checkpoints.llama().state_dict(), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        return folder

    def test_needs_the_flag(self, tmp_path: Path) -> None:
        refused(self.pickled(tmp_path), r"pickle only \(pytorch_model\.bin\).*--allow-pickle")

    def test_is_read_with_it(self, tmp_path: Path) -> None:
        report = attemper.check(str(self.pickled(tmp_path)), allow_pickle=True)
        assert len(report.rows) == checkpoints.LAYERS
        assert report.exit_code() == 0

    def test_code_in_it_is_never_run(self, tmp_path: Path) -> None:
        folder, witness = self.pickled(tmp_path / "model"), tmp_path / "ran"

        class Evil:
            def __reduce__(self) -> Any:
                return Path.touch, (witness,)

        (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"w": Evil()}))
        with pytest.raises(LoadError, match="could not be loaded: UnpicklingError"):
            attemper.check(str(folder), allow_pickle=True)
        assert not witness.exists()

    def test_a_shard_named_as_one_of_the_other_kind(self, tmp_path: Path) -> None:
        refused(
            index(tmp_path, {"w": "pytorch_model.bin"}), r"'pytorch_model\.bin'; expected file names that end in \.safetensors"
        )

    def test_a_compressed_archive(self, tmp_path: Path) -> None:
        folder = self.pickled(tmp_path)
        with zipfile.ZipFile(folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("data.pkl", b"\0" * 10_000)
        refused(folder, "is a compressed archive", allow_pickle=True)

    def test_shards_are_held_to_the_same_rules(self, tmp_path: Path) -> None:
        folder = checkpoints.config_only(tmp_path)
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"w": "../x.bin"}}))
        refused(folder, r"'\.\./x\.bin'", allow_pickle=True)


class TestConfigurations:
    def check(self, folder: Path, match: str, **changes: Any) -> None:
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(LoadError, match=match):
            attemper.check(str(folder))

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return checkpoints.save(checkpoints.llama(), tmp_path / "model")

    def test_more_layers_than_anyone_has(self, folder: Path) -> None:
        self.check(folder, "num_hidden_layers = 1000000000", num_hidden_layers=10**9)

    def test_far_more_parameters_than_the_files_hold(self, folder: Path) -> None:
        self.check(folder, r"describes \d+ numbers, but the weight files hold \d+", vocab_size=10**12)

    def test_far_more_positions_than_anyone_has(self, tmp_path: Path) -> None:
        folder = checkpoints.save(checkpoints.bert(), tmp_path)
        self.check(folder, r"describes \d+ numbers, but the weight files hold \d+", max_position_embeddings=10**11)

    def test_deep_nesting(self, folder: Path) -> None:
        nested: dict[str, Any] = {"num_hidden_layers": 10**9}
        for _ in range(900):
            nested = {"a": nested}
        self.check(folder, "num_hidden_layers = 1000000000|cannot be read as JSON", own=nested)

    @pytest.mark.parametrize(
        ("name", "value"),
        [("num_labels", 10**9), ("depths", [2, 10**9]), ("num_experts", 10**9), ("n_blocks", {"a": {"n_blocks": 10**9}})],
    )
    def test_more_parts_than_anyone_has(self, folder: Path, name: str, value: Any) -> None:
        self.check(folder, rf"asks for {name} = 1000000000; at most \d+ are accepted", **{name: value})

    def test_quantised_weights_hold_more_numbers_but_not_that_many(self, folder: Path) -> None:
        packed = {"vocab_size": 10**9, "quantization_config": {"quant_method": "fp8"}}
        self.check(folder, r"describes \d+ numbers, but the weight files hold \d+", **packed)

    @pytest.mark.parametrize("value", ["someone/kernel", {"": "someone/kernel"}, {"text_config": "someone/kernel"}])
    def test_attention_code_from_elsewhere(self, folder: Path, value: Any) -> None:
        self.check(folder, "names attention code elsewhere", _attn_implementation=value)

    def test_no_room_for_a_token(self, folder: Path) -> None:
        self.check(folder, "says that it takes -1 tokens", max_position_embeddings=-1)

    @pytest.mark.parametrize("frames", [10**9, -1, "many", [3]])
    def test_an_input_that_nobody_can_hold(self, tmp_path: Path, frames: Any) -> None:
        from transformers import ViTConfig, ViTModel

        sizes = {"hidden_size": 20, "num_attention_heads": 5, "intermediate_size": 23, "num_hidden_layers": 2}
        folder = checkpoints.save(ViTModel(ViTConfig(**sizes, image_size=16, patch_size=8)), tmp_path, tokenizer=False)
        self.check(folder, r"asks for an input of \(3, 16, 16, .* numbers; expected at most", num_frames=frames)

    @pytest.mark.parametrize("start", [10**30, "first"])
    def test_a_token_that_is_none(self, tmp_path: Path, start: Any) -> None:
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(vocab_size=311, d_model=20, d_kv=4, d_ff=23, num_layers=2, num_heads=5, decoder_start_token_id=0)
        folder = checkpoints.save(T5ForConditionalGeneration(config), tmp_path)
        self.check(folder, "none could be made from the configuration of .*; expected --inputs", decoder_start_token_id=start)

    def test_code_of_its_own(self, folder: Path) -> None:
        self.check(
            folder, "--trust-remote-code", model_type="mine", auto_map={"AutoConfig": "mine.Mine", "AutoModel": "mine.Model"}
        )

    def test_an_unknown_kind(self, folder: Path) -> None:
        self.check(folder, "could not be loaded", model_type="no-such-kind")

    def test_shapes_that_do_not_fit(self, folder: Path) -> None:
        self.check(folder, r"have other shapes than its config\.json asks for", intermediate_size=59)

    def test_attention_that_the_files_lack(self, folder: Path) -> None:
        # Four layers are asked for, three are there: the fourth would be random, and its figures mean nothing.
        lacking = r"lacks weights of attention or of the embedding \(4 parameters, such as model\.layers\.3\.self_attn"
        self.check(folder, lacking, num_hidden_layers=4)
