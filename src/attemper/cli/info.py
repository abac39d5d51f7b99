"""`attemper info`: versions, kernels and extras, for a bug report."""

from attemper.cli.environment import describe
from attemper.cli.output import say


def command() -> None:
    """Print versions, kernels, threads and installed extras, for a bug report."""
    say(describe(), hang=2)
