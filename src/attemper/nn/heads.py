"""How the heads lie side by side in a projection: how wide each is, and which of them one call of a kernel can take."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attemper.errors import ArgumentError


class HeadGroup(NamedTuple):
    """Heads of one width, by their places: `heads` among the query heads, `kv_heads` among the key heads."""

    width: int
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]


class HeadLayout(NamedTuple):
    """Widths of the query heads and of the key heads in the order of the projection, and the groups of equal width."""

    widths: tuple[int, ...]
    kv_widths: tuple[int, ...]
    groups: tuple[HeadGroup, ...]

    @property
    def order(self) -> list[int]:
        """Where each query head comes to lie when the groups are laid end to end."""
        laid = [head for group in self.groups for head in group.heads]
        return sorted(range(len(laid)), key=laid.__getitem__)

    def split(self, projected: Tensor) -> list[Tensor]:
        """[batch, tokens, sum of widths] → one [batch, heads of the group, tokens, width] for each group."""
        return _split(projected, self.widths, [group.heads for group in self.groups])

    def split_kv(self, projected: Tensor) -> list[Tensor]:
        """The same for keys and values."""
        return _split(projected, self.kv_widths, [group.kv_heads for group in self.groups])

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of `split`."""
        if len(parts) == 1:
            return parts[0].transpose(-3, -2).flatten(-2)
        single = [head for part in parts for head in part.unbind(-3)]
        return torch.cat([single[place] for place in self.order], -1)

    def in_order(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """One tensor of all heads from one a group; `dim` is where heads are."""
        if len(parts) == 1:
            return parts[0]
        order = torch.tensor(self.order, device=parts[0].device)
        return torch.cat(list(parts), dim).index_select(dim, order)


def lay_out(embed_dim: int, num_heads: int, num_kv_heads: int | None, head_dims: int | Sequence[int] | None) -> HeadLayout:
    """The layout of `num_heads` heads: embed_dim / num_heads wide each, or `head_dims`.

    Raises:
        ArgumentError: a number does not fit the others; the message names it.
    """
    for name, number in (("embed_dim", embed_dim), ("num_heads", num_heads)):
        _check_count(name, number)
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    _check_count("num_kv_heads", kv_heads)
    if num_heads % kv_heads:
        raise ArgumentError("num_kv_heads", str(kv_heads), f"a divisor of num_heads = {num_heads}")
    if head_dims is None and embed_dim % num_heads:
        raise ArgumentError("embed_dim", str(embed_dim), f"a multiple of num_heads = {num_heads}, or give head_dims")
    each = embed_dim // num_heads if head_dims is None else head_dims
    widths = (each,) * num_heads if isinstance(each, int) else tuple(each)
    if len(widths) != num_heads:
        raise ArgumentError("head_dims", f"{len(widths)} widths {widths}", f"num_heads = {num_heads} of them, or one number")
    for width in widths:
        _check_count("head_dims", width)

    share = num_heads // kv_heads
    kv_widths = widths[::share]
    if widths != tuple(width for width in kv_widths for _ in range(share)):
        raise ArgumentError("head_dims", str(widths), f"the same width for the {share} heads that share a key head")
    groups = []
    for width in dict.fromkeys(widths):
        heads = tuple(head for head in range(num_heads) if widths[head] == width)
        groups.append(HeadGroup(width, heads, tuple(head for head in range(kv_heads) if kv_widths[head] == width)))
    return HeadLayout(widths, kv_widths, tuple(groups))


def _split(projected: Tensor, widths: tuple[int, ...], groups: list[tuple[int, ...]]) -> list[Tensor]:
    if len(groups) == 1:
        return [projected.unflatten(-1, (len(widths), widths[0])).transpose(-3, -2)]
    single = projected.split(widths, -1)
    return [torch.stack([single[head] for head in heads], -3) for heads in groups]


def _check_count(name: str, number: object) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ArgumentError(name, repr(number), "a whole number above 0")


def of_heads(tensor: Tensor, group: HeadGroup, total: int, dim: int) -> Tensor:
    """The group's part of a tensor that holds all heads, or one for all, at `dim`."""
    if len(group.heads) == total or tensor.shape[dim] == 1:
        return tensor
    return tensor.index_select(dim, torch.tensor(group.heads, device=tensor.device))
