"""Replaces a function wherever the code of a model finds it: in the files that define its classes, and on its modules.

`from package import function` copies the name, so replacing it in the package alone would miss the copies. What is local to a
function, or an argument of it, is not found.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Generator, Iterable
from types import ModuleType
from typing import Any

from torch import nn

from attemper.capture.recorder import Recorder

Tell = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any], None]


@contextlib.contextmanager
def replaced(
    recorder: Recorder, model: nn.Module, is_it: Callable[[Any], bool], tell: Tell, packages: Iterable[ModuleType] = ()
) -> Generator[None]:
    """Wrap every function that `is_it` is true of, so that `tell` hears of its calls.

    The function runs as it is, with the torch function mode lifted, and what it calls is not told.

    Args:
        tell: called after a call with the function, its arguments by position and by name, and what it returned.
        packages: further files to look into.
    """
    wrappers: dict[int, Callable[..., Any]] = {}
    done: list[tuple[dict[str, Any], str, Any]] = []
    for names in _namespaces(model, packages):
        for name, thing in list(names.items()):
            if callable(thing) and is_it(thing):
                names[name] = wrappers.setdefault(id(thing), _wrapped(recorder, thing, tell))
                done.append((names, name, thing))
    try:
        yield
    finally:
        for names, name, thing in done:
            names[name] = thing


def _namespaces(model: nn.Module, packages: Iterable[ModuleType]) -> list[dict[str, Any]]:
    files = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    found = [vars(sys.modules[name]) for name in sorted(files) if name in sys.modules and not name.startswith("torch.")]
    return [*found, *(vars(each) for each in packages if each.__name__ not in files), *(vars(each) for each in model.modules())]


def _wrapped(recorder: Recorder, function: Callable[..., Any], tell: Tell) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not recorder.listening:
            return function(*args, **kwargs)
        before = recorder.switch(False)
        try:
            with recorder.quiet():
                output = function(*args, **kwargs)
        finally:
            recorder.switch(before)
        tell(function, args, kwargs, output)
        return output

    return call
