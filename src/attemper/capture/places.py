"""Replaces a function wherever the code of a model finds it: in the files that define its classes, on these, and on its modules.

`from package import function` copies the name, so replacing it in the package alone would miss the copies. What is local to a
function, or an argument of it, is not found.
"""

import contextlib
import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable
from types import ModuleType
from typing import Any

from torch import nn

from attemper.capture.recorder import Recorder

# What most names stand for.
_DATA = {bool, int, float, str, dict, OrderedDict, list, tuple, set, type(None), type, ModuleType, property}
Holder = ModuleType | nn.Module | type
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
    done: list[tuple[Holder, str, Any]] = []
    for holder in _holders(model, packages):
        for name, thing in [each for each in vars(holder).items() if type(each[1]) not in _DATA]:
            function = thing.__func__ if isinstance(thing, staticmethod) else thing
            if callable(function) and is_it(function):
                wrapper = wrappers.setdefault(id(function), _wrapped(recorder, function, tell))
                _put(holder, name, staticmethod(wrapper) if isinstance(thing, staticmethod) else wrapper)
                done.append((holder, name, thing))
    try:
        yield
    finally:
        for holder, name, thing in done:
            _put(holder, name, thing)


def _holders(model: nn.Module, packages: Iterable[ModuleType]) -> list[Holder]:
    kinds = dict.fromkeys(kind for module in model.modules() for kind in type(module).__mro__)
    files = {kind.__module__ for kind in kinds}
    found = [sys.modules[name] for name in sorted(files) if name in sys.modules and not name.startswith("torch.")]
    own = [kind for kind in kinds if not kind.__module__.startswith(("torch.", "builtins"))]
    return [*found, *(each for each in packages if each.__name__ not in files), *own, *model.modules()]


def _put(holder: Holder, name: str, thing: Any) -> None:
    if isinstance(holder, type):
        setattr(holder, name, thing)
    else:  # past what nn.Module does with attributes
        vars(holder)[name] = thing


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
