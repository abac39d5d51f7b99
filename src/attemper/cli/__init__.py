"""The command `attemper`: parse, call, render, exit code."""

import sys
from collections.abc import Sequence

from attemper.errors import MissingExtraError, require_packages

COULD_NOT_RUN = 2
INTERRUPTED = 130  # what shells give a command that Ctrl-C ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: what stands behind `attemper`; None: the process's own.

    Returns:
        The exit code: 0 clean, 1 findings at or above --fail-on, 2 could not run, 3 nothing to check, 130 interrupted.
    """
    try:
        require_packages({"typer": "typer", "rich": "rich"}, "cli", "run the command")
    except MissingExtraError as error:
        sys.stderr.write(f"attemper: {error}\n")
        return COULD_NOT_RUN
    try:
        from attemper.cli.app import run
    except KeyboardInterrupt:  # it takes its time
        sys.stderr.write("attemper: interrupted\n")
        return INTERRUPTED

    return run(sys.argv[1:] if arguments is None else list(arguments))
