"""The sub-command `compare`: exit codes, what goes where."""

import json
from pathlib import Path

import pytest

from attemper.checker import compare
from tests import checkpoints
from tests.cli.test_command import could_not_run, run
from tests.running import ROOT

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_a_folder_with_itself(capsys: Capture, llama_folder: Path) -> None:
    code, out, err = run(capsys, "compare", str(llama_folder), str(llama_folder))
    assert (code, err) == (0, "")
    assert "Attention is alike: 3 pairs of calls, and no difference at all, nor in the outputs." in out
    assert "the built-in passage, its own tokenizer" in out


def test_two_implementations(capsys: Capture, llama_folder: Path) -> None:
    code, out, _ = run(capsys, "compare", str(llama_folder), "--attn", "eager", "sdpa", "--max-tokens", "31")
    assert code == 0
    assert f"A: {llama_folder} (eager), computed in float32" in out
    assert f"B: {llama_folder} (sdpa), computed in float32" in out
    assert "differ by rounding alone" in out


def test_an_argument_has_the_name_of_the_option_that_was_typed(capsys: Capture) -> None:
    said = could_not_run(capsys, "compare", "attemper.examples:scaled", "--attn", "eager", "sdpa")
    assert "attemper: --attn: attemper.examples:scaled has no implementations to choose from" in said


def test_two_dtypes_as_json(capsys: Capture, llama_folder: Path) -> None:
    code, out, _ = run(capsys, "compare", str(llama_folder), "--dtypes", "float32", "bfloat16", "--output-format", "json")
    assert code == 0
    found = json.loads(out)
    assert (found["schema"], found["dtypes"], found["equal"], found["parting"]) == (1, ["float32", "bfloat16"], False, None)
    assert [row["a"] for row in found["rows"]] == [f"model.layers.{layer}.self_attn" for layer in range(3)]
    assert all(0 < row["share"] < 1 for row in found["rows"][1:])


def test_two_factories_that_part(capsys: Capture) -> None:
    factories = ("tests.checker.comparing_cases:small", "tests.checker.comparing_cases:ported")
    code, out, _ = run(capsys, "compare", *factories)
    assert code == 1
    assert "They part at layers.1, all heads: scale, factor 0.40825." in out
    assert out == f"{compare(*factories)}\n"
    code, out, _ = run(capsys, "compare", *factories, "--output-format", "json")
    assert code == 1
    parting = json.loads(out)["parting"]
    assert (parting["row"], parting["cause"], parting["heads"]) == (1, "scale", [0, 1, 2, 3])


def test_a_folder_and_a_converted_one(capsys: Capture, llama_folder: Path, tmp_path: Path) -> None:
    other = checkpoints.llama()
    other.model.layers[2].self_attn.k_proj.weight.data[8:16] *= 1.5
    folder = checkpoints.save(other, tmp_path / "converted")
    code, out, _ = run(capsys, "compare", str(llama_folder), str(folder))
    assert code == 1
    assert "They part at model.layers.2.self_attn, head 1: scale, factor 1.5." in out
    assert "different weights in model.layers.2.self_attn.k_proj.weight" in " ".join(out.split())


def test_nothing_to_compare(capsys: Capture) -> None:
    code, out, _ = run(capsys, "compare", "tests.checker.comparing_cases:blind", "tests.checker.comparing_cases:blind")
    assert code == 3
    assert "Nothing to compare: no attention call was seen." in out


def test_one_model_in_one_way(capsys: Capture, llama_folder: Path) -> None:
    assert "expected a second model, or attn or dtypes" in could_not_run(capsys, "compare", str(llama_folder))


def test_no_such_dtype(capsys: Capture, llama_folder: Path) -> None:
    assert "--dtypes: got 'float3'" in could_not_run(capsys, "compare", str(llama_folder), "--dtypes", "float32", "float3")


def test_hostile_names_are_written_out(capsys: Capture) -> None:
    code, out, _ = run(capsys, "compare", "tests.checker.comparing_cases:hostile", "tests.checker.comparing_cases:small")
    assert code == 1
    assert "\x1b" not in out
    assert "\\x1b[31m" in out
