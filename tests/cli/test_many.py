"""`check --all` on the command line."""

import json
import shutil
from pathlib import Path

import pytest

from attemper.checker import many
from attemper.checker.many import ManyReport, ModelResult
from tests.cli.test_command import Capture, could_not_run, run


@pytest.mark.slow
def test_a_folder_of_checkpoints(capsys: Capture, tmp_path: Path, llama_folder: Path) -> None:
    shutil.copytree(llama_folder, tmp_path / "good")
    shutil.copytree(llama_folder, tmp_path / "bad")
    (tmp_path / "bad" / "model.safetensors").write_bytes(b"short")
    code, out, err = run(capsys, "check", "--all", str(tmp_path), "--output-format", "json", "--max-tokens", "17")
    assert (code, err) == (2, "")
    data = json.loads(out)
    assert data["exit"] == 2
    bad, good = data["models"]
    assert (bad["model"], bad["exit"], good["model"], good["exit"]) == (str(tmp_path / "bad"), 2, str(tmp_path / "good"), 0)
    assert "model.safetensors is truncated" in bad["error"]
    assert "17 tokens" in good["report"]["inputs"]


def test_arguments(capsys: Capture, tmp_path: Path) -> None:
    assert "MODEL: got 'x'; expected none beside --all" in could_not_run(capsys, "check", "x", "--all", str(tmp_path))
    assert "names no model" in could_not_run(capsys, "check", "--all", str(tmp_path))
    (tmp_path / "list.txt").write_text("a\n")
    refused = could_not_run(capsys, "check", "--all", str(tmp_path / "list.txt"), "--output-format", "github")
    assert "--output-format: got 'github'; expected text or json beside --all" in refused
    assert "expected --all with it" in could_not_run(capsys, "check", "--jobs", "3")


@pytest.mark.parametrize(("form", "begin"), [("github", "model "), ("json", '{"schema"')])
def test_what_a_file_wants_of_single_checks(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, begin: str
) -> None:
    monkeypatch.setattr(many, "check_many", lambda *_arguments, **_options: ManyReport((ModelResult("a", 0, 1.0),)))
    (tmp_path / "list.txt").write_text("a\n")
    (tmp_path / "attemper.toml").write_text(f"output-format = '{form}'\n")
    code, out, err = run(capsys, "check", "--all", str(tmp_path / "list.txt"), "--config", str(tmp_path / "attemper.toml"))
    assert (code, err) == (0, "")
    assert out.startswith(begin)


def test_options_are_passed_on(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []

    def check_many(_models: list[str], arguments: list[str], **_options: object) -> ManyReport:
        given.extend(arguments)
        return ManyReport((ModelResult("a", 0, 1.0),))

    monkeypatch.setattr(many, "check_many", check_many)
    (tmp_path / "list.txt").write_text("a\n")
    options = ["--weights-only", "--passages=3", "--inputs=x", "--inputs=y", "--threshold=large-logit=50", "--isolated"]
    assert run(capsys, "check", "--all", str(tmp_path / "list.txt"), *options)[0] == 0
    assert sorted(given) == sorted(options)
