"""The sub-command `fix`: its words and its exit codes."""

import json
from pathlib import Path

import pytest

from tests.cli.test_command import Capture, could_not_run, run


def test_without_a_pick_it_lists_what_check_proposes(capsys: Capture, llama_folder: Path) -> None:
    code, out, err = run(capsys, "fix", str(llama_folder))
    assert (code, err) == (0, "")
    assert "nothing: no finding has a remedy in the weights" in out
    assert out.endswith("Nothing to fix, nothing was written.\n")


def test_of_a_factory_it_lists_what_check_proposes(capsys: Capture, tmp_path: Path) -> None:
    code, out, err = run(capsys, "fix", "attemper.examples:unscaled")
    assert (code, err) == (0, "")
    assert "--fold 0.125:1  for ATT101" in out
    assert "Nothing was picked: pass one of the options above and --dry-run to see what it would do; what a factory" in out
    code, out, err = run(capsys, "fix", "attemper.examples:unscaled", "--fold", "0.125:1", "--dry-run")
    assert (code, err) == (0, "")
    assert "would be changed" in out
    assert "(float32): multiplied by 0.125, rounded by up to 0.0e+00 of a number" in " ".join(out.split())
    for picked in (("--fold", "0.125:1", "--out", str(tmp_path / "o")), ("--clip",)):
        refused = could_not_run(capsys, "fix", "attemper.examples:unscaled", *picked)
        assert "what a factory builds has no checkpoint to write; look with --dry-run" in refused


def test_it_writes_and_says_what(capsys: Capture, llama_folder: Path, tmp_path: Path) -> None:
    code, out, err = run(capsys, "fix", str(llama_folder), "--clip", "--threshold", "0.001", "--out", str(tmp_path / "o"))
    assert (code, err) == (0, "")
    assert "model.layers.0.self_attn head 0: " in out
    assert "through q's and k's projections" in out
    assert "after, read again from what was written" in out
    assert "loss on the next token: " in out
    assert out.endswith(f"Written to {tmp_path / 'o'}.\n")


def test_json(capsys: Capture, llama_folder: Path, tmp_path: Path) -> None:
    arguments = ("--fold", "inverse-sqrt:none", "--out", str(tmp_path / "o"), "--output-format", "json")
    code, out, _ = run(capsys, "fix", str(llama_folder), *arguments)
    assert code == 0
    assert json.loads(out)["picks"]["fold"] == ["inverse-sqrt", "none"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--clip",), "out: got None; expected a new folder"),
        (("--clip", "--threshold", "-1", "--dry-run"), "clip: got -1.0; expected a finite number above 0"),
        (("--fold", "none", "--dry-run"), "--fold: got 'none'; expected FROM:TO, such as none:inverse-sqrt"),
    ],
)
def test_what_it_cannot_do_is_one_line(capsys: Capture, llama_folder: Path, arguments: tuple[str, ...], words: str) -> None:
    assert words in could_not_run(capsys, "fix", str(llama_folder), *arguments)
