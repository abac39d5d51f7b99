"""Keeps the graphs of torch.compile from running while anyone asks for it, and then puts back what there was."""

import weakref
from typing import Any

import torch

_asking: dict[int, weakref.finalize] = {}  # who asks, and what ends it where they are gone
_before: list[Any] = []  # torch's own way back, while somebody asks


def ask(who: object, wanted: bool) -> None:
    """Ask for it, or no more. Whoever asks and is gone asks no more."""
    if wanted and id(who) not in _asking:
        if not _asking:
            _before.append(torch.compiler.set_stance("force_eager"))
        _asking[id(who)] = weakref.finalize(who, _release, id(who))
    elif not wanted:
        _release(id(who))


def _release(key: int) -> None:
    if key in _asking:
        _asking.pop(key).detach()
        if not _asking:
            _before.pop().__exit__(None, None, None)
