"""Faults are counted as they should be: what is missed shows, what cries wolf shows, and either makes the exit code 1."""

import contextlib
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.check_faults import __main__ as command
from benchmarks.check_faults import running
from benchmarks.check_faults.__main__ import Bars, main
from benchmarks.check_faults.kinds import KINDS, KNOWN, Kind
from benchmarks.check_faults.models import NAMES, Tiny, build
from benchmarks.check_faults.planting import NotApplicableError, calls_altered
from benchmarks.check_faults.running import Sound
from benchmarks.report import around_markers
from tests.capture.watching import same
from tests.running import ROOT

TWO = ["--architectures", "llama", "bert"]
BY_NAME = {kind.name: kind for kind in KINDS}


@contextlib.contextmanager
def nothing(tiny: Tiny) -> Generator[frozenset[str]]:
    yield frozenset(tiny.attention)


@contextlib.contextmanager
def nowhere(tiny: Tiny) -> Generator[frozenset[str]]:
    raise NotApplicableError
    yield frozenset()


@pytest.fixture
def all_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sound models take a second, and here faults are counted."""
    monkeypatch.setattr(command, "sound", lambda name: [Sound(name, "float32", "right", (), ())])


MISSED = Kind("a fault that is not there", ("ATT101",), nothing)
NOT_HERE = Kind("a fault that fits nowhere", ("ATT101",), nowhere)


@pytest.mark.slow
def test_every_kind_runs_and_is_written_between_the_markers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = tmp_path / "check_faults.md"
    document.write_text("before\n<!-- benchmarks.check_faults: begin -->\nold\n<!-- benchmarks.check_faults: end -->\nafter\n")
    assert main(["--quick", "--write", str(document)]) == 0
    printed, written = capsys.readouterr().out, document.read_text("utf-8")
    assert "4 of 4 bars held, 0 missed, in " in printed.splitlines()[-1]
    assert written.startswith("before\n")
    assert written.endswith("<!-- benchmarks.check_faults: end -->\nafter\n")
    assert "\nold\n" not in written
    assert "`python -m benchmarks.check_faults --quick`, 20" in written
    for kind in KINDS:
        assert f"| {kind.name} | {' or '.join(kind.codes)} | " in written
    assert "| bfloat16 | right | 3 | 0 | 0 |" in written


@pytest.mark.usefixtures("all_sound")
def test_a_miss_that_is_not_known_makes_the_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = (BY_NAME["no scale"], MISSED)
    assert main(TWO, Bars(kinds=1, architectures=2, sound=2), kinds) == 1
    printed = capsys.readouterr().out
    assert "no scale" in printed
    assert "2 / 2       100.0%" in printed
    assert "0 / 2         0.0%" in printed
    assert "2 / 4        50.0%" in printed  # of both kinds together
    assert "missed: misses that are not listed as known; a fault that is not there in llama, bert: 1, bar ≤ 0" in printed
    assert "3 of 4 bars held, 1 missed" in printed


@pytest.mark.usefixtures("all_sound")
def test_a_known_miss_is_told_and_does_not_count_as_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(KNOWN, (MISSED.name, ""), "it was never planted")
    assert main(TWO, Bars(kinds=0, architectures=2, sound=2), (MISSED,)) == 0
    assert "- a fault that is not there: llama, bert. Why: it was never planted." in capsys.readouterr().out
    assert main(TWO, Bars(kinds=1, architectures=2, sound=2), (MISSED,)) == 1
    assert "found wherever they were planted, in 2 architectures or more: 0, bar ≥ 1" in capsys.readouterr().out


@pytest.mark.usefixtures("all_sound")
def test_a_known_miss_that_is_found_is_to_be_struck(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(KNOWN, ("no scale", "llama"), "it used to be missed")
    assert main(TWO, Bars(1, 2, 2), (BY_NAME["no scale"],)) == 0
    assert "strike them from the list: no scale in llama." in capsys.readouterr().out


@pytest.mark.usefixtures("all_sound")
def test_too_few_architectures_are_not_enough() -> None:
    assert main(TWO, Bars(kinds=1, architectures=3, sound=2), (BY_NAME["no scale"],)) == 1
    assert main(TWO, Bars(kinds=1, architectures=2, sound=3), (BY_NAME["no scale"],)) == 1


@pytest.mark.usefixtures("all_sound")
def test_what_fits_nowhere_is_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(TWO, Bars(kinds=1, architectures=0, sound=2), (NOT_HERE,)) == 0
    assert main(TWO, Bars(kinds=1, architectures=1, sound=2), (NOT_HERE,)) == 1
    assert "0 / 0" in capsys.readouterr().out


def test_a_false_alarm_makes_the_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def wrong(name: str, **options: object) -> Tiny:
        tiny = build(name, **options)
        for module in tiny.model.modules():
            if hasattr(module, "scaling"):
                module.scaling = 1.0
        return tiny

    monkeypatch.setattr(running, "build", wrong)
    assert main(["--architectures", "llama"], Bars(0, 0, 1), ()) == 1
    printed = capsys.readouterr().out
    assert "- llama, float32, padding none: ATT101 model.layers.0.self_attn: " in printed
    assert "missed: sound models with a finding of severity error: 4, bar ≤ 0" in printed


@pytest.mark.parametrize("name", ["llama", "t5", "gpt_oss", "whisper"])
def test_altering_nothing_changes_nothing(name: str) -> None:
    tiny = build(name)
    plain = tiny.model(**tiny.inputs)
    with calls_altered(tiny.model, lambda call: call.with_visible(call.visible)):
        assert same(plain, tiny.model(**tiny.inputs))
    with calls_altered(tiny.model, lambda call: replace(call, query=0 * call.query)):
        assert not same(plain, tiny.model(**tiny.inputs))
    assert same(plain, tiny.model(**tiny.inputs))


def test_the_known_misses_name_kinds_and_architectures() -> None:
    assert {kind for kind, _ in KNOWN} <= set(BY_NAME)
    assert {name for _, name in KNOWN} <= {"", *NAMES}


def test_the_document_is_written_by_whole_runs_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--quick", "--write"])
    assert "--write without FILE wants the whole run" in capsys.readouterr().err
    around_markers(ROOT / "docs" / "check_faults.md", "benchmarks.check_faults")
