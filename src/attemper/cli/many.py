"""`check --all`: passes the options on to each check, shows a bar, and writes one table."""

import contextlib
import sys
from collections.abc import Callable, Generator, Mapping
from typing import Any

from attemper.checker.folder import path_of
from attemper.cli.output import write_json
from attemper.cli.signals import ended_as_interrupted
from attemper.errors import ArgumentError


def check_all(
    place: str,
    passed: Mapping[str, Any],
    *,
    output_format: str,
    asked: bool,
    jobs: int,
    timeout: float | None,
    ray: str | None,
) -> int:
    """Check the models in that folder or list, write the summary, and return the exit code.

    Args:
        passed: options of the single checks by name: None and False were not given, True is a flag, a list is given often.
        output_format: how to write the summary. asked: whether the command line chose it; what a configuration file chose for
            single checks, and a summary does not have, is text.

    Raises:
        ArgumentError: the command line asks for a format that a summary does not have.
    """
    from attemper.checker.many import check_many, find_models, plain_text

    if asked and output_format not in ("text", "json"):
        raise ArgumentError("--output-format", repr(output_format), "text or json beside --all")
    models = find_models(path_of(place))
    with _bar(len(models)) as advance, ended_as_interrupted():
        report = check_many(models, _arguments(passed), jobs=jobs, timeout=timeout, ray=ray, done=advance)
    if output_format == "json":
        write_json(report.to_dict())
    else:
        sys.stdout.write(plain_text(report) + "\n")
        sys.stdout.flush()
    return report.exit_code()


def _arguments(passed: Mapping[str, Any]) -> list[str]:
    arguments: list[str] = []
    for name, value in passed.items():
        if value is True:
            arguments.append(f"--{name}")
        elif value is not None and value is not False:
            arguments += [f"--{name}={each}" for each in (value if isinstance(value, list) else [value])]
    return arguments


@contextlib.contextmanager
def _bar(count: int) -> Generator[Callable[[Any], None]]:
    """A bar on stderr, if that is a terminal, that a result moves on."""
    if not sys.stderr.isatty():
        yield lambda _result: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    with Progress(BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=count)
        yield lambda _result: bar.advance(task)
