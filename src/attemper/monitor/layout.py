"""What the ranks agree on before they reduce: which layers, in which order, and which rank has which of their heads."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from attemper.errors import ArgumentError
from attemper.monitor.ordering import merged
from attemper.monitor.sharding import HeadShard, shards

Key = tuple[str, int]


class Entry(NamedTuple):
    """One layer of the layout: how many heads each part of it has, in order."""

    key: Key
    sizes: tuple[int, ...]

    @property
    def heads(self) -> int:
        """How many heads all parts have together."""
        return sum(self.sizes)


class Plan:
    """What the ranks of a group agreed on: made on every rank at once, kept by whoever gathers, and used by all alike.

    Args:
        model: on this rank; the names of layers are those of its `named_modules`. A stage of a pipeline keeps the names that its
            modules have in the whole model: layers of one name are taken for one.
        group: over which to gather; None: all ranks, or this process alone where torch.distributed is not initialised.
        tensor_parallel, replicated: how heads are shared out, as in `attemper.monitor.sharding.shards`.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None = None,
        tensor_parallel: object = None,
        replicated: Sequence[str] = (),
    ) -> None:
        self.model, self.group = model, group
        self.tensor_parallel, self.replicated = tensor_parallel, tuple(replicated)
        self.layout: tuple[Entry, ...] = ()
        self._shards: dict[str, HeadShard] = {}

    def place(self, entry: Entry, heads: int) -> slice | None:
        """Where this rank's heads go among all of an entry; None where others speak for them, or the layout is not about them."""
        shard = self._shards.get(entry.key[0])
        if shard is None or not shard.counted or not _fitting(entry, shard, heads):
            return None
        start = sum(entry.sizes[: shard.part])
        return slice(start, start + heads)

    def fits(self, mine: Mapping[Key, int]) -> bool:
        """Whether the layout has a place for everything that this rank has: (layer, call) → how many heads."""
        entries = {entry.key: entry for entry in self.layout}
        for key, heads in mine.items():
            shard = self._shards.get(key[0])
            if shard is None or key not in entries or not _fitting(entries[key], shard, heads):
                return False
        return True

    def agree(self, mine: Mapping[Key, int], group: dist.ProcessGroup | None) -> None:
        """Draw a new layout from what all ranks have. A collective, with one outcome for all of them, errors included."""
        claims: list[_Claim] | ArgumentError
        try:
            claims = self._claims(mine)
        except ArgumentError as error:  # raised below, once all ranks know of it
            claims = error
        everybody: list[Any] = [claims]
        if group is not None:
            everybody = [None] * dist.get_world_size(group)
            dist.all_gather_object(everybody, claims, group=group)
        for claimed in everybody:
            if isinstance(claimed, ArgumentError):
                raise claimed
        known = {entry.key: entry.sizes for entry in self.layout}
        order = merged([*([claim.key for claim in claimed] for claimed in everybody), list(known)])
        self.layout = tuple(Entry(key, _sizes(key, everybody, known.get(key, ()))) for key in order)
        # Of layers that others saw, too: when this rank sees them, nothing is new.
        self._shards = self._shards_of(layer for layer, _ in order)

    def _shards_of(self, layers: Iterable[str]) -> dict[str, HeadShard]:
        return shards(self.model, list(dict.fromkeys(layers)), self.tensor_parallel, self.replicated)

    def _claims(self, mine: Mapping[Key, int]) -> "list[_Claim]":
        found = self._shards_of(layer for layer, _ in mine)
        places = {name: place for place, (name, _) in enumerate(self.model.named_modules())}
        keys = sorted(mine, key=lambda key: (places.get(key[0], len(places)), key[1]))
        return [_Claim(key, mine[key], found[key[0]].part, found[key[0]].parts) for key in keys]


class _Claim(NamedTuple):
    """What one rank says of one layer while a layout is agreed on."""

    key: Key
    heads: int
    part: int
    parts: int


def _fitting(entry: Entry, shard: HeadShard, heads: int) -> bool:
    return len(entry.sizes) == shard.parts and entry.sizes[shard.part] == heads


def _sizes(key: Key, everybody: Sequence[Sequence[_Claim]], known: tuple[int, ...]) -> tuple[int, ...]:
    """How many heads each part of a layer has: as the ranks claim it, and as it was known of parts that no rank has now."""
    claims = [(rank, claim) for rank, claimed in enumerate(everybody) for claim in claimed if claim.key == key]
    if not claims:
        return known
    layer, parts = repr(key[0]), claims[0][1].parts
    sizes = dict(enumerate(known)) if len(known) == parts else {}
    first: dict[int, tuple[int, int]] = {}
    for rank, claim in claims:
        other, heads = first.setdefault(claim.part, (rank, claim.heads))
        if claim.parts != parts:
            given = f"{layer} in {parts} parts on rank {claims[0][0]} and in {claim.parts} on rank {rank}"
            raise ArgumentError("tensor_parallel", given, "the same on every rank")
        if claim.heads != heads:
            given = f"{heads} heads of {layer} on rank {other} and {claim.heads} on rank {rank}"
            expected = "as many everywhere, or the process group over which they are sharded; layers that differ need two names"
            raise ArgumentError("tensor_parallel", given, expected)
        sizes[claim.part] = claim.heads
    missing = [part for part in range(parts) if part not in sizes]
    if missing:
        given = f"one without part {missing[0]} of the {parts} over which the heads of {layer} are sharded"
        raise ArgumentError("group", given, "a group with every tensor-parallel rank, all of which ran the layer")
    return tuple(sizes[part] for part in range(parts))
