"""A tokenizer is a small program that the checkpoint brings along: it is run only where it cannot do harm."""

import json
from pathlib import Path
from typing import Any

import pytest

import attemper
from attemper.checker.tokenizer_files import hostile
from tests import checkpoints


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoints.save(checkpoints.llama(), tmp_path / "model")


def change(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def replacement(text: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": "e"}, "content": text}


def told(folder: Path, words: str) -> None:
    """The check goes on, on random ids, and says why."""
    report = attemper.check(str(folder))
    assert report.exit_code() == 0
    assert any(words in note for note in report.notes), report.notes
    assert "random token ids" in report.inputs


def test_a_usual_one_is_run(folder: Path) -> None:
    change(folder / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": [replacement("ee")] * 3})
    assert hostile(folder) == ""
    change(folder / "tokenizer.json", normalizer=None)
    assert "its own tokenizer" in attemper.check(str(folder)).inputs


def test_replacements_that_multiply(folder: Path) -> None:
    nested = {"type": "Sequence", "normalizers": [replacement("e" * 100)] * 3}
    change(folder / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": [nested, nested]})
    told(folder, "its normalizer makes text up to 1000000000000 times as long")


def test_a_template_without_end(folder: Path) -> None:
    piece = {"SpecialToken": {"id": "[BOS]", "type_id": 0}}
    template = {"type": "TemplateProcessing", "single": [piece] * 1000, "pair": [], "special_tokens": {}}
    change(folder / "tokenizer.json", post_processor=template)
    told(folder, "its post-processor adds 1000 pieces to each text")


@pytest.mark.parametrize("name", ["vocab", "merges"])
def test_files_of_its_own_choice(folder: Path, name: str) -> None:
    change(folder / "tokenizer_config.json", **{name: "/dev/zero"})
    told(folder, f"tokenizer_config.json names a file of its own choice as {name}")


def test_a_library_that_panics(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # tokenizers gives up on a pattern that backtracks without end, and pyo3's panic is no Exception.
    pattern = {"Regex": r"(([a-z]+\s?)+)+\d\d\d\dz"}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    change(folder / "tokenizer.json", pre_tokenizer=split)
    told(folder, "the tokenizer failed (PanicException: Onig: Regex search error: retry-limit-in-match over)")
    capfd.readouterr()


@pytest.mark.parametrize("text", ["[]", "{", '{"a":' + "[" * 100_000, '{"version": "1.0", "version": "2.0"}'])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_files_that_are_no_settings(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    told(folder, "no tokenizer could be loaded (LoadError: ")


@pytest.mark.parametrize("limit", [-1, 0, 1e400, "long", [1]])
def test_a_length_that_is_none(folder: Path, limit: Any) -> None:
    change(folder / "tokenizer_config.json", model_max_length=limit)
    assert attemper.check(str(folder)).exit_code() == 0
