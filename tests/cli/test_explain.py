"""`attemper explain`: the list of topics, one of them, a page, and what cannot be explained."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from attemper.cli import main
from attemper.lesson import TOPICS, question_of
from attemper.report.page import requirements
from tests.running import ROOT

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_without_a_topic_it_lists_them(capsys: Capture, language: str) -> None:
    assert main(["explain", "--lang", language]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert [line.split()[0] for line in out.splitlines()] == list(TOPICS)
    assert all(question_of(name, language) in out for name in TOPICS)


def test_the_document_lists_them_too() -> None:
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| (.*) \|$", (ROOT / "docs" / "explain.md").read_text("utf-8"), re.MULTILINE)
    assert rows == [(name, question_of(name, "en")) for name in TOPICS]


def test_a_topic_in_the_terminal(capsys: Capture) -> None:
    assert main(["explain", "rope-yarn"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("Does RoPE change what the scale must be, and why does YaRN?\n")
    for words in ("Measured on this machine", "[right] RoPE keeps norms", "arXiv 2309.00071", "1.631", "measured in 0."):
        assert words in out
    assert "\x1b" not in out


def test_a_topic_in_chinese(capsys: Capture) -> None:
    assert main(["explain", "rope-yarn", "--lang", "zh"]) == 0
    out = capsys.readouterr().out
    assert "在本机上测得" in out
    assert "[对] RoPE 保持模长" in out


def test_a_reader_who_has_gone_is_no_failure() -> None:
    command = [sys.executable, "-m", "attemper", "explain", "rope-yarn"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 0


@pytest.mark.parametrize("words", [[], ["--html", "page.html"]])
def test_an_unknown_topic_lists_those_that_there_are(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "why-sqrt", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"attemper: TOPIC: got 'why-sqrt'; expected one of {', '.join(TOPICS)}" in err
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_language(capsys: Capture) -> None:
    assert main(["explain", "--lang", "de"]) == 2
    assert "'de' is not one of 'en', 'zh'" in capsys.readouterr().err


def test_a_page_of_one_topic(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "lesson.html"
    assert main(["explain", "many-heads", "--html", str(path), "--lang", "zh"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert f"{path}: 1 topic, measured in" in out.replace("\n", " ")
    page = path.read_text("utf-8")
    assert '<html lang="zh">' in page
    assert 'id="many-heads"' in page
    assert 'id="why-sqrt-d"' not in page


def test_what_stops_a_page_is_said_before_anything_is_measured(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attemper.cli.explain.chapter", lambda *_: pytest.fail("it measured"))
    assert main(["explain", "--html", str(tmp_path)]) == 2
    assert "--html: got a folder" in capsys.readouterr().err
    monkeypatch.setattr(requirements, "_PACKAGES", {"nowhere_at_all": "altair"})
    assert main(["explain", "--html", str(tmp_path / "page.html")]) == 2
    assert "altair is needed to make a report page; install it with: pip install 'attemper[html]'" in capsys.readouterr().err
