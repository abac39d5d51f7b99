"""`merge`: two records over disjoint key sets become the record of their union, and so do the outputs that go with them."""

from typing import overload

from torch import Tensor

from attemper.errors import ArgumentError
from attemper.stats.rows import RowStats, merge_rows, shares

Part = tuple[Tensor, RowStats]


@overload
def merge(a: RowStats, b: RowStats) -> RowStats: ...


@overload
def merge(a: Part, b: Part) -> Part: ...


def merge(a: RowStats | Part, b: RowStats | Part) -> RowStats | Part:
    """Merge two records, or two (output, record) pairs, that cover disjoint sets of keys for the same queries.

    record: see `RowStats`; output = w_a·output_a + w_b·output_b with w = e^(lse − lse_union). Associative and commutative up to
    rounding; a part without visible keys (lse −inf) changes nothing. Gradients flow through the outputs, lse and entropy.
    A sink is a part of its own (`RowStats.from_sink`, with an output of zeros): merge it once, last.

    Args:
        a, b: `RowStats` of shape [..., heads, queries], or pairs (output [..., heads, queries, d_v], `RowStats`).
            `argmax` must already count over the union: shift a slice of the keys by `RowStats.with_key_offset`.

    Returns:
        The same kind as was given.

    Raises:
        ArgumentError: the two are of different kinds or shapes, or both hold a sink.

    Source: the online softmax, Milakov and Gimelshein 2018 (arXiv 1805.02867), section 3.1.
    """
    if isinstance(a, RowStats) and isinstance(b, RowStats):
        _check(a, b)
        return merge_rows(a, b)
    if isinstance(a, tuple) and isinstance(b, tuple):
        (output_a, rows_a), (output_b, rows_b) = a, b
        _check(rows_a, rows_b)
        if output_a.shape != output_b.shape:
            raise ArgumentError("b", f"an output of shape {tuple(output_b.shape)}", f"the shape of a's, {tuple(output_a.shape)}")
        if output_a.shape[:-1] != rows_a.lse.shape:
            expected = f"{tuple(rows_a.lse.shape)} and one more dimension, as its record says"
            raise ArgumentError("a, b", f"outputs of shape {tuple(output_a.shape)}", expected)
        share_a, share_b = (share.unsqueeze(-1) for share in shares(rows_a.lse, rows_b.lse))
        output = share_a * output_a.to(share_a.dtype) + share_b * output_b.to(share_a.dtype)
        return output.to(output_a.dtype), merge_rows(rows_a, rows_b)
    given = f"{type(a).__name__} and {type(b).__name__}"
    raise ArgumentError("a, b", given, "two RowStats, or two (output, RowStats) pairs")


def _check(a: RowStats, b: RowStats) -> None:
    for name, record in (("a", a), ("b", b)):
        if not isinstance(record, RowStats):
            raise ArgumentError(name, type(record).__name__, "a RowStats")
    if a.lse.shape != b.lse.shape:
        raise ArgumentError("b", f"rows of shape {tuple(b.lse.shape)}", f"the shape of a's, {tuple(a.lse.shape)}")
    if a.sink and b.sink:
        raise ArgumentError("b", "a record with a sink, as is a's", "a sink in one of them at most: merge it once, last")
