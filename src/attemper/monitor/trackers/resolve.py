"""Trackers from what a person writes: an instance, a function, or the name of one and where it writes."""

import inspect
from collections.abc import Callable, Iterable
from importlib import metadata

from attemper.errors import ArgumentError, AttemperError
from attemper.monitor.records import RunInfo, StepRecord
from attemper.monitor.trackers.base import Tracker
from attemper.monitor.trackers.guard import Guarded

GROUP = "attemper.trackers"
_PLACES = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


class Calling:
    """A function as a tracker: it is called with each record."""

    def __init__(self, function: Callable[[StepRecord], object]) -> None:
        self.function = function

    def begin(self, run: RunInfo) -> None:
        """Nothing is to be done."""

    def log(self, record: StepRecord) -> None:
        """Call it."""
        self.function(record)

    def close(self) -> None:
        """Nothing is to be done."""


def resolve(trackers: "str | Tracker | Callable[[StepRecord], object] | Iterable[object]") -> list[Guarded]:
    """Make trackers that a fault in one of them does not stop; see `Guarded`.

    Args:
        trackers: one of, or any number of: a tracker; a function of one record; "name" or "name:where", such as "parquet:runs/a",
            where the name is an entry point of the group `attemper.trackers` and what it names is called with where: as its first
            argument, or as the one that its attribute `WHERE` names.

    Raises:
        ArgumentError: no tracker has that name, it needs a where or takes none, what has it is broken, or it is none of these.
    """
    if isinstance(trackers, str | Tracker) or callable(trackers):
        trackers = (trackers,)
    if not isinstance(trackers, Iterable):
        raise ArgumentError("trackers", repr(trackers), 'trackers, functions, or strings such as "parquet:runs/a"')
    return [_guarded(each) for each in trackers]


def _guarded(given: object) -> Guarded:
    if isinstance(given, Guarded):
        return given
    if isinstance(given, str):
        return Guarded(_named(given))
    if isinstance(given, type):
        raise ArgumentError("trackers", f"the class {given.__name__}", f"an instance of it: {given.__name__}(…)")
    if isinstance(given, Tracker):
        return Guarded(given)
    if callable(given):
        return Guarded(Calling(given), getattr(given, "__qualname__", type(given).__name__))
    raise ArgumentError("trackers", repr(given), 'a tracker, a function of one record, or a string such as "parquet:runs/a"')


def _named(text: str) -> Tracker:
    name, _, where = text.partition(":")
    # Those of attemper last, so that no other package takes their names.
    points = sorted(metadata.entry_points(group=GROUP), key=lambda point: point.value.startswith("attemper."))
    known = {point.name: point for point in points}
    if name not in known:
        raise ArgumentError(
            "trackers", repr(text), f"one of {', '.join(sorted(known))}, with :WHERE behind it where it writes to a place"
        )
    point = known[name]
    try:
        tracker = _made(point.load(), text, name, where)
    except AttemperError:
        raise
    except Exception as error:  # whatever another package's module or constructor raises
        raise _broken(text, point, f"{type(error).__name__}: {error}") from error
    if not isinstance(tracker, Tracker):
        raise _broken(text, point, f"it makes a {type(tracker).__name__}, which lacks begin, log or close")
    return tracker


def _made(make: Callable[..., object], text: str, name: str, where: str) -> object:
    named = getattr(make, "WHERE", None)
    if named is not None:
        return make(**{named: where}) if where else make()
    parameters = inspect.signature(make).parameters.values()
    places = [each for each in parameters if each.kind in _PLACES]
    needed = [each.name for each in places if each.default is each.empty and each.kind != each.VAR_POSITIONAL]
    if needed and not where:
        raise ArgumentError("trackers", repr(text), f'"{name}:{needed[0].upper()}", where it is to write')
    if where and not places:
        raise ArgumentError("trackers", repr(text), f'"{name}" alone: it writes to no place')
    return make(where) if where else make()


def _broken(text: str, point: metadata.EntryPoint, fault: str) -> ArgumentError:
    package = f"the package {point.dist.name} {point.dist.version}" if point.dist else "a package"
    given = f"{text!r}, which {package} brings as {point.value} and which failed: {fault}"
    return ArgumentError("trackers", given, "a tracker that works: put that package right, or leave the tracker out")
