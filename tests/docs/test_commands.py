"""The page of commands is what the commands print."""

import re

import pytest

from attemper.cli import main
from docs.pages.commands import WIDTH, commands, commands_list


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words, "--help"]) == 0
    return re.sub(r" +$", "", capsys.readouterr().out, flags=re.MULTILINE).rstrip()


def below(text: str) -> list[str]:
    """The sub-commands that a help lists."""
    _, _, listed = text.partition("Commands:\n")
    return re.findall(r"^  ([a-z-]+)  ", listed, re.MULTILINE)


def test_each_command_and_option_is_on_the_page_as_it_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    page, seen = commands_list(), [()]
    for words in seen:
        text = printed(capsys, *words)
        name = " ".join(("attemper", *words))
        assert f"## {name}\n\n```text\n$ {name} --help\n{text}\n```\n" in page
        assert "--help" in text
        seen += [(*words, each) for each in below(text)]
    assert ("lab", "run") in seen
    assert sorted(seen) == sorted(commands())
    assert page.count("\n## ") + 1 == len(seen)
