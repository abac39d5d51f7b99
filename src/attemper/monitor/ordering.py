"""One order of layers out of the orders that several ranks know, each of its own part of the model."""

import re
from collections.abc import Sequence


def merged(orders: Sequence[Sequence[tuple[str, int]]]) -> list[tuple[str, int]]:
    """All (name, call) of the given orders, each once: what stands before another in one order stands before it in the result.

    Where the orders leave it open, as between the stages of a pipeline, names that differ in their numbers alone follow these
    numbers (interleaved stages hold layers 0, 1, 4, 5 and 2, 3, 6, 7), and kinds of names follow the ranks and places where they
    came up first. Orders that contradict one another are followed as far as they go.
    """
    kinds: dict[str, int] = {}
    before: dict[tuple[str, int], set[tuple[str, int]]] = {}
    for order in orders:
        for place, key in enumerate(order):
            kinds.setdefault(_kind(key[0]), len(kinds))
            before.setdefault(key, set()).update(order[max(place - 1, 0) : place])

    def rank(key: tuple[str, int]) -> tuple[int, list[int], int]:
        return kinds[_kind(key[0])], [int(number) for number in re.findall(r"\d+", key[0])], key[1]

    waiting, result = sorted(before, key=rank), []
    while waiting:
        ready = next((key for key in waiting if before[key].isdisjoint(waiting)), waiting[0])
        waiting.remove(ready)
        result.append(ready)
    return result


def _kind(name: str) -> str:
    return re.sub(r"\d+", "#", name)
