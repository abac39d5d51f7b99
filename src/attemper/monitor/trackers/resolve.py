"""Trackers from what a person writes: an instance, a function, or the name of one and where it writes."""

import inspect
from collections.abc import Callable, Iterable
from importlib import metadata

from attemper.errors import ArgumentError
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
        ArgumentError: no tracker has that name, it needs a where or takes none, or it is none of these.
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
    known = {point.name: point for point in metadata.entry_points(group=GROUP)}
    if name not in known:
        raise ArgumentError(
            "trackers", repr(text), f"one of {', '.join(sorted(known))}, with :WHERE behind it where it writes to a place"
        )
    make = known[name].load()
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
