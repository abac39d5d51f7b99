"""The configuration: where it is found, what wins, and one clear line for what cannot be used."""

import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest

from attemper.checker.options import DTYPES
from attemper.checker.thresholds import THRESHOLDS
from attemper.cli import main
from attemper.cli.check import Dtype, FailOn
from attemper.cli.config import KEYS, settings, shown
from attemper.errors import AttemperError, LoadError
from attemper.report.records import FAIL_ON

WHOLE = """
select = ["ATT1", "ATT3"]
ignore = "ATT302"
fail-on = "warning"
dtype = "float16"
max-tokens = 61
max-memory = "16GiB"
output-format = "json"
baseline = "known/baseline.json"
docs-url = "https://docs.example/attemper"

[per-layer-ignores]
"*.0.*" = "ATT301,ATT2"

[severities]
ATT301 = "error"

[thresholds]
large-logit = 53
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose configuration stands two folders above the working directory."""
    (tmp_path / "attemper.toml").write_text(WHOLE)
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    return tmp_path


def test_it_is_found_upwards(project: Path) -> None:
    found = settings({})
    assert found.file == project / "attemper.toml"
    assert found["select"] == ["ATT1", "ATT3"]
    assert found["ignore"] == ["ATT302"]
    assert found["per-layer-ignores"] == {"*.0.*": ["ATT301", "ATT2"]}
    assert found["severities"] == {"ATT301": "error"}
    assert found["thresholds"] == {"large-logit": 53}
    assert found["baseline"] == str(project / "known" / "baseline.json")
    assert found["max-memory"] == "16GiB"


def test_flags_win_and_thresholds_one_by_one(project: Path) -> None:
    found = settings({"select": ["att2"], "thresholds": {"sink-rows": 0.25}, "baseline": "here.json", "dtype": None})
    assert found["select"] == ["ATT2"]
    assert found["ignore"] == ["ATT302"]
    assert found["thresholds"] == {"large-logit": 53, "sink-rows": 0.25}
    assert found["baseline"] == "here.json"
    assert found["dtype"] == "float16"
    assert found.origins["select"] == "command line"
    assert found.origins["dtype"] == str(project / "attemper.toml")


def test_isolated_reads_none(project: Path) -> None:
    found = settings({}, isolated=True)
    assert found.file is None
    assert dict(found.values) == {name: key.default for name, key in KEYS.items()}


def test_its_own_file_goes_before_the_shared_one_and_a_nearer_one_before_both(project: Path) -> None:
    (project / "pyproject.toml").write_text("[tool.attemper]\nmax-tokens = 7\n")
    assert settings({})["max-tokens"] == 61
    (project / "a" / "pyproject.toml").write_text("[tool.other]\nmax-tokens = 7\n")
    assert settings({})["max-tokens"] == 61
    (project / "a" / "pyproject.toml").write_text("[tool.attemper]\nmax-tokens = 7\n")
    assert settings({})["max-tokens"] == 7
    assert settings({})["select"] == []  # files are not merged


def test_a_named_one(project: Path) -> None:
    (project / "other.toml").write_text("max-tokens = 11\n")
    assert settings({}, file=str(project / "other.toml"))["max-tokens"] == 11
    with pytest.raises(LoadError, match=r"--config nowhere.toml: no such file"):
        settings({}, file="nowhere.toml")
    (project / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    with pytest.raises(LoadError, match=r"it has no table \[tool.attemper\]"):
        settings({}, file=str(project / "pyproject.toml"))
    with pytest.raises(AttemperError, match=r"--config: got 'other.toml'; expected no --isolated"):
        settings({}, file="other.toml", isolated=True)


def test_what_is_shown_is_toml_and_says_where_it_comes_from(project: Path) -> None:
    found = settings({"fail-on": "info", "thresholds": {"sink-rows": 0.25}, "per-layer-ignores": {'a"\\\x1b\n.*': ["ATT301"]}})
    text = "\n".join(shown(found))
    assert "\x1b" not in text
    data = tomllib.loads(text)
    assert data["select"] == ["ATT1", "ATT3"]
    assert data["fail-on"] == "info"
    assert data["per-layer-ignores"] == {'a"\\\x1b\n.*': ["ATT301"]}
    assert list(data["thresholds"]) == [each.name for each in THRESHOLDS]
    assert data["thresholds"]["large-logit"] == 53
    assert 'fail-on = "info"  # command line' in text
    assert f"max-tokens = 61  # {project / 'attemper.toml'}" in text
    assert f"large-logit = 53  # {project / 'attemper.toml'}" in text
    assert "sink-rows = 0.25  # command line" in text
    assert "at-rest-rows = 0.9  # default" in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-token = 3", "max-token: got an unknown key; expected max-tokens?"),
        ("nonsense = 3", "nonsense: got an unknown key; expected one of select, "),
        ("allow-pickle = true", "allow-pickle: got a key that no file may set; expected --allow-pickle on the command line"),
        ("trust-remote-code = true", "trust-remote-code: got a key that no file may set"),
        ("select = 3", "select: got 3; expected codes or beginnings of codes"),
        ("select = [3]", "select: got [3]; expected codes"),
        ("select = ['ATT9']", "select: got 'ATT9'; expected a code or the beginning of one: ATT101, "),
        ("ignore = {}", "ignore: got {}; expected codes"),
        ("fail-on = 'fatal'", "fail-on: got 'fatal'; expected one of error, warning, info, never"),
        ("fail-on = ['error']", "fail-on: got ['error']; expected one of"),
        ("dtype = 'int4'", "dtype: got 'int4'; expected one of auto, "),
        ("max-tokens = '3'", "max-tokens: got '3'; expected a whole number"),
        ("max-tokens = true", "max-tokens: got True; expected a whole number"),
        ("max-tokens = 1", "max-tokens: got 1; expected 2 tokens or more"),
        ("max-memory = 'lots'", "max-memory: got 'lots'; expected a size such as 800MB"),
        ("max-memory = -3", "max-memory: got -3"),
        ("output-format = 'yaml'", "output-format: got 'yaml'; expected one of text, json"),
        ("baseline = 3", "baseline: got 3; expected the name of a file"),
        ("docs-url = 'javascript:x'", "docs-url: got 'javascript:x'; expected an address"),
        ("per-layer-ignores = ['a']", "per-layer-ignores: got ['a']; expected a table"),
        ("per-layer-ignores = {'a.*' = 3}", "per-layer-ignores: got {'a.*': 3}; expected a table"),
        ("per-layer-ignores = {'a.*' = 'ATT9'}", "per-layer-ignores['a.*']: got 'ATT9'"),
        ("severities = {ATT9 = 'info'}", "severities: got 'ATT9'"),
        ("severities = {ATT1 = 'fatal'}", "severities['ATT1']: got 'fatal'"),
        ("severities = {ATT1 = 3}", "severities['ATT1']: got 3"),
        ("thresholds = 3", "thresholds: got 3; expected a table"),
        ("thresholds = {large-logits = 3}", "thresholds.large-logits: got an unknown key; expected large-logit?"),
        ("thresholds = {large-logit = '3'}", "thresholds.large-logit: got '3'; expected a number, 0 or more"),
        ("thresholds = {saturated-share = 50}", "thresholds.saturated-share: got 50; expected a number from 0 to 1"),
        ("= 3", "is not TOML: Invalid statement"),
        ("\x00", "is not TOML"),
        ('"\\u001b[2J" = 3', "\\x1b[2J: got an unknown key"),
    ],
)
def test_one_clear_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    (tmp_path / "attemper.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    code = main(["check"])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith(f"attemper: {tmp_path / 'attemper.toml'}")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("text", ["[tool]\nattemper = 3\n", "tool = 3\n", "[[tool.attemper]]\n"])
def test_a_shared_file_of_another_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    if "attemper" in text:
        with pytest.raises(AttemperError, match=r"pyproject.toml: tool.attemper: got .*; expected a table"):
            settings({})
    else:
        assert settings({}).file is None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"thresholds": {"x": 3.0}}, "--threshold x: got an unknown key; expected one of"),
        ({"thresholds": {"large-logit": -3.0}}, "--threshold large-logit: got -3.0"),
        ({"per-layer-ignores": {"a.*": ["ATT9"]}}, r"--per-layer-ignore 'a\.\*': got 'ATT9'"),
        ({"ignore": ["ATT9"]}, "--ignore: got 'ATT9'"),
        ({"max-memory": "0"}, "--max-memory: got '0'"),
    ],
)
def test_a_flag_is_named_as_it_is_written(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(AttemperError, match=words):
        settings(flags, isolated=True)


def test_the_choices_of_flags_are_those_of_the_library() -> None:
    assert get_args(FailOn) == tuple(map(str, FAIL_ON))
    assert get_args(Dtype) == DTYPES


def test_a_limit_on_memory_is_passed_over_for_what_is_built_already(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "attemper.toml").write_text('max-memory = "64GB"')
    monkeypatch.chdir(tmp_path)
    assert main(["check", "attemper.examples:scaled"]) == 0
    capsys.readouterr()
    assert main(["check", "attemper.examples:scaled", "--max-memory", "64GB"]) == 2
    assert "--max-memory: attemper.examples:scaled is built already" in capsys.readouterr().err
