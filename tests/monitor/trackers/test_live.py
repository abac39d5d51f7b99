"""The live table fits a terminal, and is a line a step where there is none."""

import dataclasses
import io
import re

import pytest

from attemper.monitor.trackers import Live
from tests.monitored import INFO, record_of


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_it_is_a_line_a_step_and_a_line_an_alarm() -> None:
    stream = io.StringIO()
    live = Live(stream=stream)
    live.begin(INFO)
    live.log(record_of(0))
    live.log(record_of(1))
    live.close()
    lines = stream.getvalue().splitlines()
    assert [line.partition(",")[0] for line in lines] == [
        *("step 0", "  step 0: ATT501 warning: a logit is large", "  step 0: ATT503 error: entropy fell", "step 1"),
    ]


def test_on_a_terminal_it_is_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    stream = Terminal()
    live = Live(most=2, stream=stream)
    live.begin(INFO)
    live.log(record_of(0))
    live.log(record_of(2))
    live.close()
    text = stream.getvalue()
    assert "step 2 · loss 1" in text
    last = re.sub(r"\x1b\[[0-9?;]*[A-Za-z]", "", text[text.rindex("step 2") :])
    rows = [line.split() for line in last.splitlines() if len(line.split()) == 7 and line.split()[0] != "layer"]
    largest = sorted(record_of(2).layers, key=lambda layer: -float(layer.scaled_max.max()))[:2]
    chosen = [layer for layer in record_of(2).layers if layer.name in {each.name for each in largest}]
    assert [row[:2] for row in rows] == [[layer.name or "model", f"{float(layer.stats.max.max()):.4g}"] for layer in chosen]
    assert "and 2 more layers" in last
    assert "ATT501 warning: a logit is large" in last  # of the step before


def test_names_do_not_reach_the_terminal_as_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    record = record_of(2)
    layer = dataclasses.replace(record.layers[0], layer="a\x1b[2Jb[red]c")
    for stream in (io.StringIO(), Terminal()):
        live = Live(stream=stream)
        live.begin(INFO)
        live.log(dataclasses.replace(record, layers=(layer,)))
        live.close()
        assert r"a\x1b[2Jb[red]c" in stream.getvalue()
        assert "\x1b[2J" not in stream.getvalue()
