"""Where the command's words go: reports to stdout, progress to stderr, and what models print kept out of both."""

import contextlib
import json
import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Generator
from typing import Any

from rich.console import Console

from attemper.report import Report
from attemper.report.terminal import print_report
from attemper.report.text import plain_text

_LINE = 100


def write_report(report: Report, rule_names: dict[str, str]) -> None:
    """Write the report for people: in colour on a terminal, else as plain text that no terminal's width cuts."""
    console = Console(file=sys.stdout, highlight=False)
    if console.is_terminal:
        print_report(report, console, rule_names)
    else:
        sys.stdout.write(plain_text(report, rule_names) + "\n")
    sys.stdout.flush()


def write_json(data: dict[str, Any]) -> None:
    """Write one JSON object on one line; control characters in names are escaped, as JSON in ASCII is."""
    json.dump(data, sys.stdout, ensure_ascii=True, allow_nan=False)
    sys.stdout.write("\n")
    sys.stdout.flush()


def write_text(text: str) -> None:
    """Write a text that is wrapped already."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def close_stdout() -> None:
    """Whoever read it has gone: nothing more can be said there, not even by the interpreter when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_lines(lines: list[str], hang: int = 0) -> None:
    """Write lines, the long ones wrapped and indented by `hang` from their second line on."""
    wrap = textwrap.TextWrapper(_LINE, subsequent_indent=" " * hang, break_on_hyphens=False, break_long_words=False)
    for line in lines:
        sys.stdout.write(wrap.fill(line) + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def progress() -> Generator[Callable[[str], None]]:
    """A function that says on stderr what is being done, if stderr is a terminal."""
    if not sys.stderr.isatty():  # rich would take FORCE_COLOR, which asks for colour in a log, for a terminal
        yield lambda _words: None
        return
    with Console(stderr=True, highlight=False).status("", spinner="line") as status:
        yield lambda words: status.update(_plain(words))


@contextlib.contextmanager
def silenced() -> Generator[None]:
    """Send what models and factories print to stderr, and drop their warnings: what matters is in the report."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _plain(words: str) -> Any:
    from rich.text import Text

    from attemper.report.names import safe

    return Text(safe(words))
