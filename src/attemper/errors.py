"""The one family of errors that attemper raises.

Every message says what was given, what was expected, and what to do; the command turns each into one line and exit code 2.
"""

import importlib.util
from collections.abc import Mapping


class AttemperError(Exception):
    """Base of every error that attemper raises on purpose."""


class ArgumentError(AttemperError, ValueError):
    """An argument that cannot be used.

    Args:
        argument: name of the argument, as the caller wrote it.
        given: what was given (a value, a shape, a dtype), as text.
        expected: what would have been accepted, and what to do, as text.
    """

    def __init__(self, argument: str, given: object, expected: str) -> None:
        self.argument, self.given, self.expected = argument, given, expected

    def __str__(self) -> str:
        # Here and not handed to Exception.__init__, which torch.compile cannot trace: it would hide the message.
        return f"{self.argument}: got {self.given}; expected {self.expected}"


class UnsupportedError(AttemperError, NotImplementedError):
    """A correct request that this implementation or installation cannot carry out. The message says which could."""


class MissingExtraError(AttemperError, ImportError):
    """An optional package is needed and absent.

    Args:
        package: the distribution that is missing.
        extra: the extra of attemper that installs it.
        purpose: what it is needed for, as a phrase after "to".
    """

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{package} is needed to {purpose}; install it with: pip install 'attemper[{extra}]'")


class LoadError(AttemperError):
    """A model or its inputs could not be read: missing, malformed, unsafe, or not what it claims to be."""


def in_one_line(said: object) -> str:
    """What another library's error says, its lines joined, so that a message that quotes it stays one line.

    Args:
        said: the error, or its words.

    Returns:
        The words with one space between them; "" where there are none.
    """
    return " ".join(str(said).split())


def require_packages(packages: Mapping[str, str], extra: str, purpose: str) -> None:
    """Do nothing if the packages can be imported; none is.

    Args:
        packages: the distribution that each module comes with, by the module's name.
        extra, purpose: as for `MissingExtraError`.

    Raises:
        MissingExtraError: one is absent, the first in order.
    """
    for module, package in packages.items():
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(package, extra, purpose)
