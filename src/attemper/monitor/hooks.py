"""Hooks that belong to one model: a copy of it, by copy.deepcopy or pickle, has none."""

from collections.abc import Callable
from typing import Any


class Hook:
    """A hook that does nothing once it is copied."""

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = method

    def __call__(self, *arguments: Any) -> None:
        """Run it."""
        self._method(*arguments)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _nothing


def _nothing(*arguments: Any) -> None:
    pass
