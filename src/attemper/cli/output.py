"""Where the command's words go: reports to stdout, progress to stderr, and what models print kept out of both."""

import contextlib
import ctypes
import json
import os
import sys
import textwrap
import warnings
from collections.abc import Generator, Sequence
from typing import Any

from rich.console import Console

from attemper.checker.options import Progress, untold
from attemper.report import Report
from attemper.report.names import safe
from attemper.report.terminal import print_report
from attemper.report.text import plain_text

_LINE = 100


def write_report(report: Report, rule_names: dict[str, str], extra: Sequence[tuple[str, list[str]]] = ()) -> None:
    """Write the report for people: in colour on a terminal, else as plain text that no terminal's width cuts.

    Args:
        rule_names: the few words for each code. extra: titled lists to stand before the closing line.
    """
    console = Console(file=sys.stdout, highlight=False)
    if console.is_terminal:
        print_report(report, console, rule_names, extra)
    else:
        sys.stdout.write(plain_text(report, rule_names, extra) + "\n")
    sys.stdout.flush()


def write_text(text: str) -> None:
    """Write text as it is."""
    sys.stdout.write(text)
    sys.stdout.flush()


def json_line(data: dict[str, Any]) -> str:
    """One JSON object on one line; control characters in names are escaped, as JSON in ASCII is."""
    return json.dumps(data, ensure_ascii=True, allow_nan=False) + "\n"


def write_json(data: dict[str, Any]) -> None:
    """Write `json_line`, in one piece."""
    write_text(json_line(data))


def say(lines: list[str], hang: int = 0) -> None:
    """Write lines, the long ones wrapped and indented by `hang` from their second line on; nothing if the reader has gone."""
    wrap = textwrap.TextWrapper(_LINE, subsequent_indent=" " * hang, break_on_hyphens=False, break_long_words=False)
    try:
        write_text("".join(wrap.fill(line) + "\n" for line in lines))
    except BrokenPipeError:
        close_stdout()


def close_stdout() -> None:
    """Whoever read it has gone: nothing more can be said there, not even by the interpreter when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def progress() -> Generator[Progress]:
    """A function that says on stderr what is being done and how much of it is done, if stderr is a terminal."""
    if not sys.stderr.isatty():  # rich would take FORCE_COLOR, which asks for colour in a log, for a terminal
        yield untold
        return
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        SpinnerColumn("line"),
        TextColumn("{task.fields[words]}", markup=False),
        BarColumn(20),
        TextColumn("{task.fields[count]}"),
    )
    bars = Bars(
        *columns, TimeElapsedColumn(), console=Console(stderr=True, highlight=False), transient=True, redirect_stdout=False
    )
    with bars:
        task = bars.add_task("", total=None, words="", count="")

        def tell(words: str, done: int = 0, total: int = 0) -> None:
            # More calls than layers, as in an encoder-decoder: how far it is, is not known after all.
            known = total if 0 < done <= total else None
            count = f"{done} of {total} layers" if known else f"{done} layers" if done else ""
            bars.update(task, words=safe(words), completed=done, total=known, count=count)

        yield tell


@contextlib.contextmanager
def silenced() -> Generator[None]:
    """Send what models and factories print to stderr, and drop their warnings: what matters is in the report."""
    with contextlib.redirect_stdout(sys.stderr), _descriptor_redirected(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _descriptor_redirected() -> Generator[None]:
    """Let descriptor 1 lead where 2 does: libraries and child processes write there, past Python's own stdout."""
    try:
        kept = os.dup(1)
    except OSError:  # closed, as in a process without a console: there is nothing to keep clean
        yield
        return
    try:
        _flush()
        os.dup2(_open_for_errors(), 1)
        yield
    finally:
        _flush()
        os.dup2(kept, 1)
        os.close(kept)


def _open_for_errors() -> int:
    """Descriptor 2, or that of the null device where it is closed."""
    try:
        os.fstat(2)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)
    return 2


def _flush() -> None:
    """Write out what waits for descriptor 1 in Python's own stdout and in C's, while it leads where that belongs."""
    with contextlib.suppress(OSError, ValueError):
        if sys.__stdout__ is not None:
            sys.__stdout__.flush()
    with contextlib.suppress(OSError, AttributeError, TypeError):  # a system without such a library
        ctypes.CDLL(None).fflush(None)
