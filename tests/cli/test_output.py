"""Progress: on a terminal, as far as it is known; nowhere else."""

import io
import sys

import pytest

import attemper
from attemper.cli.output import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("done", "total", "words"),
    [(3, 4, "3 of 4 layers"), (5, 4, "5 layers"), (3, 0, "3 layers"), (0, 0, "running")],
)
def test_how_far_it_is(monkeypatch: pytest.MonkeyPatch, done: int, total: int, words: str) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)  # here: pytest puts its own back between a fixture and its test
    with progress() as tell:
        tell("running [red]model[/red]\x1b]0;title\x07", done, total)
    text = terminal.getvalue()
    assert words in text
    assert "[red]model[/red]\\x1b]0;title\\x07" in text
    assert "\x1b]0" not in text


def test_a_log_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress() as tell:
        tell("running", 1, 2)
    assert stream.getvalue() == ""


def test_a_check_tells_its_layers() -> None:
    told: list[tuple[str, int, int]] = []
    attemper.check(progress=lambda words, done=0, total=0: told.append((words, done, total)))
    running = [(done, total) for words, done, total in told if words.startswith("running ")]
    assert running == [(0, 4), (0, 4), (1, 4), (2, 4), (3, 4)]
    assert told[0][0] == "loading the model"
    assert told[-1][0].startswith("trying ")
