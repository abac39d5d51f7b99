"""The folder that `fix` writes: beside the model, whole or not at all."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import attemper
from attemper.checker.remedies import fix, writing
from attemper.errors import ArgumentError, LoadError, UnsupportedError
from tests import checkpoints

SHARED = checkpoints.llama()


def give_out() -> torch.nn.Module:
    return SHARED


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoints.save(checkpoints.llama(), tmp_path / "model")


class TestPlace:
    @pytest.mark.parametrize("place", ["model", "model/fixed", "model/../model/deep"])
    def test_never_in_the_model(self, folder: Path, place: str) -> None:
        before = bytes_of(folder)
        with pytest.raises(ArgumentError, match=rf"out: got .*{place}; expected a folder outside the model's own"):
            fix(folder, folder.parent / place, clip=0.001)
        assert bytes_of(folder) == before

    def test_nor_through_a_link(self, folder: Path) -> None:
        (folder.parent / "link").symlink_to(folder)
        with pytest.raises(ArgumentError, match="expected a folder outside the model's own"):
            fix(folder, folder.parent / "link", clip=0.001)

    def test_nor_over_anything(self, folder: Path) -> None:
        (folder.parent / "taken").mkdir()
        (folder.parent / "taken" / "precious").write_text("1")
        with pytest.raises(ArgumentError, match="taken, which exists; expected a new folder, or an empty one"):
            fix(folder, folder.parent / "taken", clip=0.001)
        assert bytes_of(folder.parent / "taken") == {"precious": b"1"}

    def test_nor_where_there_is_no_parent(self, folder: Path) -> None:
        with pytest.raises(ArgumentError, match=r"whose parent does not exist; expected a new folder in one that exists"):
            fix(folder, folder.parent / "a" / "b", clip=0.001)

    def test_an_empty_folder_will_do(self, folder: Path) -> None:
        (folder.parent / "empty").mkdir()
        fix(folder, folder.parent / "empty", clip=0.001)
        assert attemper.check(folder.parent / "empty").totals.max_logit <= 0.001

    def test_it_is_needed(self, folder: Path) -> None:
        with pytest.raises(ArgumentError, match="out: got None; expected a new folder to write to"):
            fix(folder, clip=0.001)

    def test_a_dry_run_needs_none_and_writes_nothing(self, folder: Path) -> None:
        before = bytes_of(folder.parent)
        report = fix(folder, clip=0.001, dry_run=True)
        assert len(report.changed) == 2 * checkpoints.LAYERS
        assert report.after is None
        assert bytes_of(folder.parent) == before

    def test_what_a_factory_builds_has_no_checkpoint(self, tmp_path: Path) -> None:
        with pytest.raises(ArgumentError, match=r"model: got attemper\.examples:unscaled; expected a folder or a Hub id"):
            fix("attemper.examples:unscaled", tmp_path / "fixed", clip=1.0)
        assert list(tmp_path.iterdir()) == []

    def test_of_a_factory_it_lists_and_tries(self) -> None:
        listed = fix("attemper.examples:unscaled")
        assert [proposal.codes for proposal in listed.proposals] == [("ATT101",)]
        assert not listed.writable
        tried = fix("attemper.examples:unscaled", clip=50.0, dry_run=True)
        assert {clip.module for clip in tried.clips} == {f"blocks.{block}.attention" for block in (1, 2, 3)}
        assert {each.tensor for each in tried.changed} >= {"blocks.3.attention.q_proj.weight"}
        assert all(each.dtype == "float32" and each.least < 1 for each in tried.changed)
        assert (tried.out, tried.after) == ("", None)

    def test_a_module_that_others_hold_is_as_it_was(self) -> None:
        fix(f"{__name__}:give_out", clip=0.001, dry_run=True)
        assert all(torch.equal(a, b) for a, b in zip(SHARED.parameters(), checkpoints.llama().parameters(), strict=True))

    def test_it_has_the_permissions_of_any_folder(self, folder: Path) -> None:
        fix(folder, folder.parent / "fixed", clip=0.001)
        (folder.parent / "other").mkdir()
        assert (folder.parent / "fixed").stat().st_mode == (folder.parent / "other").stat().st_mode


class TestWhole:
    @pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
    @pytest.mark.parametrize("step", ["_save", "_flush"])
    def test_nothing_is_left_where_writing_fails(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
    ) -> None:
        def fail(*_: Any) -> None:
            raise error

        monkeypatch.setattr(writing, step, fail)
        before = bytes_of(folder.parent)
        with pytest.raises((LoadError, KeyboardInterrupt), match=r"No space left|^$"):
            fix(folder, folder.parent / "fixed", clip=0.001)
        assert bytes_of(folder.parent) == before
        assert [file.name for file in folder.parent.iterdir()] == ["model"]

    def test_nor_where_what_was_written_cannot_be_checked(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        save = writing._save
        monkeypatch.setattr(writing, "_save", lambda tensors, file, meta: save({"w": torch.ones(3)}, file, meta))
        with pytest.raises(LoadError, match="lacks weights of attention"):
            fix(folder, folder.parent / "fixed", clip=0.001)
        assert [file.name for file in folder.parent.iterdir()] == ["model"]

    @pytest.mark.slow
    def test_nor_where_the_command_is_ended(self, folder: Path, tmp_path: Path) -> None:
        # The command is held, half done, where it would write the weights.
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / "sitecustomize.py").write_text(
            "import threading, time\n"
            "def hold():\n"
            "    import sys\n"
            "    while 'attemper.checker.remedies.writing' not in sys.modules: time.sleep(0.01)\n"
            "    time.sleep(0.5)\n"
            "    module = sys.modules['attemper.checker.remedies.writing']\n"
            f"    module._save = lambda *_: (open({str(tmp_path / 'reached')!r}, 'w').close(), time.sleep(60))\n"
            "threading.Thread(target=hold, daemon=True).start()\n"
        )
        environment = os.environ | {"PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        command = [
            sys.executable,
            "-m",
            "attemper",
            "fix",
            str(folder),
            "--clip",
            "--threshold",
            "0.001",
            "--out",
            str(tmp_path / "o"),
        ]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        while not (tmp_path / "reached").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert list(tmp_path.glob(".o.*.partial/config.json"))
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
        assert process.returncode == 130, err
        assert (out, err) == ("", "attemper: interrupted\n")
        assert not list(tmp_path.glob(".o.*"))
        assert not (tmp_path / "o").exists()


class TestFiles:
    def test_everything_else_comes_along(self, folder: Path) -> None:
        (folder / "README.md").write_text("words")
        (folder / "onnx").mkdir()
        (folder / "onnx" / "model.onnx").write_text("old weights")
        (folder / "onnx" / "notes.txt").write_text("kept")
        (folder / "pytorch_model.bin").write_bytes(b"old weights")
        (folder / "pytorch_model.bin.index.json").write_text("{}")
        report = fix(folder, folder.parent / "fixed", clip=0.001)
        old, new = bytes_of(folder), bytes_of(folder.parent / "fixed")
        left = {"onnx/model.onnx", "pytorch_model.bin", "pytorch_model.bin.index.json"}
        assert new.keys() == old.keys() - left
        assert {name for name in new if new[name] != old[name]} == {"model.safetensors"}
        assert any(", ".join(sorted(left)) in note for note in report.notes)

    @pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
    def test_what_leads_out_of_the_model_or_is_no_file(self, folder: Path, kind: str) -> None:
        (folder.parent / "secret").mkdir()
        (folder / "sub").mkdir()
        if kind == "pipe":
            os.mkfifo(folder / "sub" / "x")
        elif kind == "link":
            (folder / "sub" / "x").symlink_to(folder.parent / "secret" / "file")
        else:
            (folder / "sub" / "x").symlink_to(folder.parent / "secret")
        with pytest.raises(LoadError, match=r"sub/x is (a link to a folder|not a regular file)"):
            fix(folder, folder.parent / "fixed", clip=0.001)
        assert sorted(file.name for file in folder.parent.iterdir()) == ["model", "secret"]

    def test_weights_that_the_model_holds_otherwise(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        read = writing._read

        def halved(file: Path, *, pickled: bool) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
            tensors, metadata = read(file, pickled=pickled)
            return {name: value / 2 for name, value in tensors.items()}, metadata

        monkeypatch.setattr(writing, "_read", halved)
        with pytest.raises(UnsupportedError, match="is stored otherwise than the model holds it"):
            fix(folder, folder.parent / "fixed", clip=0.001)

    def test_json(self, folder: Path) -> None:
        data = json.loads(json.dumps(fix(folder, folder.parent / "fixed", clip=0.001).to_dict(), allow_nan=False))
        assert data["schema"] == 1
        assert data["picks"] == {"clip": 0.001, "fold": None}
        assert data["before"]["totals"]["max_logit"] > data["after"]["totals"]["max_logit"]
        assert {clip["on"] for clip in data["clips"]} == {"both"}
        assert data["outputs"]["what"] == "logits"
