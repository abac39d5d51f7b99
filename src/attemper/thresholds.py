"""Numbers that decide, described: what each means, its unit, which codes use it, where its default comes from.

A set of thresholds is a frozen dataclass that inherits from `Described`, each field made by `threshold`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from attemper.errors import ArgumentError

OURS = "ours"


@dataclass(frozen=True)
class Meaning:
    """What a threshold says.

    Attributes:
        words: one sentence; unit: of the number; codes: the rules that use it; source: where the default comes from.
        low, high: what may be set, both included.
    """

    words: str
    unit: str
    codes: tuple[str, ...]
    source: str
    low: float = 0.0
    high: float = math.inf


@dataclass(frozen=True)
class Threshold:
    """One threshold, described: its name as configurations write it, its default, its meaning."""

    name: str
    default: float
    meaning: Meaning


def threshold(default: float, meaning: Meaning) -> Any:
    """The field of one threshold in a set of them."""
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True)
class Described:
    """A set of thresholds that can be set by name.

    Raises:
        ArgumentError: one of them is not a number in its range.
    """

    def __post_init__(self) -> None:
        for each in self.described():
            value = getattr(self, each.name.replace("-", "_"))
            meaning = each.meaning
            if type(value) not in (int, float) or not meaning.low <= value <= meaning.high or math.isinf(value):
                raise ArgumentError(f"thresholds.{each.name}", repr(value), _range(meaning))

    @classmethod
    def described(cls) -> tuple[Threshold, ...]:
        """Each of them: name, default, meaning."""
        return tuple(
            Threshold(each.name.replace("_", "-"), each.default, each.metadata["meaning"])
            for each in fields(cls)
            if isinstance(each.default, (int, float))
        )

    @classmethod
    def of(cls, given: "Mapping[str, float] | Described | None") -> Self:
        """The defaults, with those that are given by name (hyphens or underscores).

        Raises:
            ArgumentError: no threshold has the name, or the number is out of its range.
        """
        if given is None:
            return cls()
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            raise ArgumentError("thresholds", repr(given), "numbers by the names of thresholds")
        known = [each.name for each in cls.described()]
        changes = {}
        for name, value in given.items():
            if name.replace("_", "-") not in known:
                raise ArgumentError("thresholds", repr(name), f"one of {', '.join(known)}")
            changes[name.replace("-", "_")] = value
        return replace(cls(), **changes)

    def by_name(self) -> dict[str, float]:
        """The numbers by the names that configurations use."""
        return {each.name: getattr(self, each.name.replace("-", "_")) for each in self.described()}


def _range(meaning: Meaning) -> str:
    return (
        f"a number from {meaning.low:g} to {meaning.high:g}" if meaning.high < math.inf else f"a number, {meaning.low:g} or more"
    )
