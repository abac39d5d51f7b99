"""How a sequence lies over the ranks of a process group: which positions each of them holds."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from attemper.errors import ArgumentError

LAYOUTS = ("contiguous", "zigzag")


class Run(NamedTuple):
    """Neighbouring positions of the whole sequence, and where they begin in the part of the rank that holds them."""

    start: int
    length: int
    here: int

    @property
    def slice(self) -> slice:
        """Where they are within the part."""
        return slice(self.here, self.here + self.length)


def runs(lengths: Sequence[int], layout: str) -> list[tuple[Run, ...]]:
    """The runs that each rank holds.

    Args:
        lengths: how many positions each rank holds.
        layout: "contiguous": one run a rank, in the order of the ranks, each of any length. "zigzag": of 2·ranks pieces of equal
            length (the first ones have one position more where they do not divide the sequence), rank r holds number r and
            number 2·ranks − 1 − r, so that under the causal rule all have the same work.

    Raises:
        ArgumentError: no such layout, or these lengths are not those of its parts.
    """
    check_layout(layout)
    ranks, total = len(lengths), sum(lengths)
    if layout == "contiguous":
        return [(Run(sum(lengths[:rank]), lengths[rank], 0),) for rank in range(ranks)]
    starts = _cuts(total, 2 * ranks)
    sizes = [end - start for start, end in zip(starts, [*starts[1:], total], strict=True)]
    pairs = [(rank, 2 * ranks - 1 - rank) for rank in range(ranks)]
    wanted = [sizes[first] + sizes[second] for first, second in pairs]
    if list(lengths) != wanted:
        expected = f"{wanted} of {total}, as ring_shard(…, layout='zigzag') cuts them"
        raise ArgumentError("layout", f"'zigzag' with {list(lengths)} positions on the ranks", expected)
    return [(Run(starts[one], sizes[one], 0), Run(starts[two], sizes[two], sizes[one])) for one, two in pairs]


def ring_shard(tensor: Tensor, dim: int = -2, *, layout: str = "contiguous", group: dist.ProcessGroup | None = None) -> Tensor:
    """This rank's part of a tensor that holds the whole sequence, for `ring_attention`: positions, token ids, q, k or v.

    Of n ranks, number r gets piece r of n; with "zigzag" pieces r and 2n − 1 − r of 2n. Pieces are those of
    `torch.tensor_split`, equal but for one position.

    Args:
        tensor: the same on every rank, such as [batch, heads, positions, d].
        dim: the dimension of the sequence.
        layout: "contiguous", or "zigzag", which shares out the work of a causal mask evenly.
        group: the ranks of the ring; None: all.

    Returns:
        A copy of the part, this rank's runs one behind the other along `dim`.

    Raises:
        ArgumentError: no such layout.

    Source: the second layout is that of Brandon et al. 2023 (arXiv 2311.09431), section 3, with two pieces a rank.
    """
    check_layout(layout)
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if layout == "contiguous":
        return tensor.tensor_split(ranks, dim)[rank].clone()
    pieces = tensor.tensor_split(2 * ranks, dim)
    return torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]], dim)


def check_layout(layout: str) -> None:
    """Refuse what is no layout."""
    if layout not in LAYOUTS:
        raise ArgumentError("layout", repr(layout), f"one of {', '.join(map(repr, LAYOUTS))}")


def _cuts(total: int, pieces: int) -> list[int]:
    """Where the pieces begin that `torch.tensor_split` makes: the first ones are longer by one where they are not equal."""
    least, longer = divmod(total, pieces)
    return [piece * least + min(piece, longer) for piece in range(pieces)]
