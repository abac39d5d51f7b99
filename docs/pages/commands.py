"""The help of every command, as it prints it, from the application itself."""

import re
from collections.abc import Iterator
from typing import Any

from typer.main import get_command
from typer.testing import CliRunner

from attemper.cli.app import app

WIDTH = 80  # columns: what the site shows without scrolling


def commands() -> Iterator[tuple[str, ...]]:
    """Every command by its words behind `attemper`, in the order of its help; () is `attemper` itself."""
    yield ()
    yield from _below(get_command(app), ())


def _below(group: Any, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        yield (*words, name)
        if hasattr(command, "commands"):
            yield from _below(command, (*words, name))


def help_of(words: tuple[str, ...]) -> str:
    """What `attemper WORDS --help` prints on a terminal of `WIDTH` columns."""
    # The command leaves two columns of a terminal free; the runner is told how many are left.
    result = CliRunner().invoke(app, [*words, "--help"], prog_name="attemper", terminal_width=WIDTH - 2)
    if result.exit_code != 0:
        raise RuntimeError(f"attemper {' '.join(words)} --help: {result.output}")
    return re.sub(r" +$", "", result.stdout, flags=re.MULTILINE).rstrip()


def commands_list() -> str:
    """A section for each command, with its help."""
    sections = []
    for words in commands():
        name = " ".join(("attemper", *words))
        sections.append(f"## {name}\n\n```text\n$ {name} --help\n{help_of(words)}\n```\n")
    return "\n".join(sections)
