"""Which call of one model belongs to which of the other: by name where the names match, else by order."""

import functools
from dataclasses import dataclass

from torch import nn

from attemper.capture import AttentionCall

Key = tuple[str, int]


@dataclass(frozen=True)
class Sequence:
    """The calls of the model that ran first, and how to find the partner of a call of the other.

    Attributes:
        calls: the records kept, in order; by_name: whether partners bear one name.
    """

    calls: tuple[AttentionCall, ...]
    by_name: bool

    def partner(self, call: AttentionCall) -> int | None:
        """Index of the call that belongs to this one, None where there is none."""
        if not self.by_name:
            return call.order if call.order < len(self.calls) else None
        return self._places.get(key_of(call))

    @functools.cached_property
    def _places(self) -> dict[Key, int]:
        return {key_of(each): place for place, each in enumerate(self.calls)}


def sequence(calls: list[AttentionCall], other: nn.Module) -> Sequence:
    """The sequence of the first model; names count if the other model has every module that made a call here."""
    names = {name for name, _ in other.named_modules()}
    return Sequence(tuple(calls), bool(calls) and all(call.module in names for call in calls))


def key_of(call: AttentionCall) -> Key:
    """What tells a call from the others of its model."""
    return call.module, call.call


def shape_of(call: AttentionCall) -> tuple[int, int, int, int]:
    """(batch, heads, queries, keys): what two calls must have in common to be compared."""
    return call.query.shape[0], call.query.shape[1], call.query.shape[2], call.key.shape[2]
