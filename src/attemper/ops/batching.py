"""vmap: a dimension that the caller does not see is folded into the batch, which the kernels already have.

Dropout depends on a row's place in the batch, and sinks have no batch to fold into: such calls run one sample after another.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Places(NamedTuple):
    """The dimension of the batch, for each of the leading arguments of an operator and for each result; None: it has none."""

    arguments: tuple[int | None, ...]
    results: tuple[int | None, ...]


# In the order of the operators' arguments and results: query, key, value, mask, scale, sinks, seed, then output, lse, entropy,
# figures, unrounded and what flows in.
FORWARD = Places((0, 0, 0, 0, 0, None, None), (0, 0, 0, 1, 1, 0))
ROW_STATS = Places((0, 0, 0, 0, None), (0, 0, 1))
BACKWARD = Places((0, 0, 0, 0, 0, None, None, 0, 0, 0, 1, 0, 0, 0, 0), (0, 0, 0, 0, 0, None))


def rule(call: Callable[..., tuple[Tensor, ...]], places: Places) -> Callable[..., tuple[Any, Any]]:
    """The vmap rule of an operator, or of a Function of the same arguments.

    Args:
        call: it, for one level of vmap less.
    """

    def batched(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        if _foldable(in_dims, arguments, places):
            return _folded(call, places, info.batch_size, in_dims, arguments)
        return _one_by_one(call, info.batch_size, in_dims, arguments)

    return batched


def nothing(tensor: Tensor | None) -> bool:
    """Whether an operator's argument or result stands for nothing: it is None, or of one dimension and no element."""
    return tensor is None or tensor.shape == (0,)


def _foldable(in_dims: tuple[Any, ...], arguments: tuple[Any, ...], places: Places) -> bool:
    without_batch = [i for i, place in enumerate(places.arguments) if place is None and arguments[i] is not None]
    # A gradient without a batch would be summed over the samples.
    summed = None in places.results
    seeded = places is not ROW_STATS and arguments[6] is not None
    return not seeded and not any(summed or in_dims[i] is not None for i in without_batch)


def _folded(
    call: Callable[..., tuple[Tensor, ...]], places: Places, samples: int, in_dims: tuple[Any, ...], arguments: tuple[Any, ...]
) -> tuple[Any, Any]:
    query = arguments[0] if in_dims[0] is None else arguments[0].movedim(in_dims[0], 0)[0]
    batch = query.shape[0]
    folded = list(arguments)
    own = []  # the batch of each argument itself: 1 where it stands for all
    for i, place in enumerate(places.arguments):
        tensor, dim = arguments[i], in_dims[i]
        if place is None or nothing(tensor):
            own.append(batch)
            continue
        spread = tensor.unsqueeze(place) if dim is None else tensor.movedim(dim, place)
        own.append(spread.shape[place + 1])
        shape = (*spread.shape[:place], samples, batch, *spread.shape[place + 2 :])
        folded[i] = spread.expand(shape).flatten(place, place + 1)
    results, out_dims = [], []
    for i, (result, place) in enumerate(zip(call(*folded), places.results, strict=True)):
        if place is None or nothing(result):
            results.append(result)
            out_dims.append(None)
            continue
        apart = result.unflatten(place, (samples, batch))
        if places is BACKWARD and own[i] != batch:
            apart = apart.sum(1, keepdim=True, dtype=torch.float64).to(apart.dtype)
        results.append(apart)
        out_dims.append(place)
    return tuple(results), tuple(out_dims)


def _one_by_one(
    call: Callable[..., tuple[Tensor, ...]], samples: int, in_dims: tuple[Any, ...], arguments: tuple[Any, ...]
) -> tuple[Any, Any]:
    def of_sample(i: int) -> tuple[Tensor, ...]:
        return call(
            *(each.select(dim, i) if isinstance(dim, int) else each for each, dim in zip(arguments, in_dims, strict=True))
        )

    columns = list(zip(*(of_sample(i) for i in range(samples)), strict=True))
    missing = [nothing(column[0]) for column in columns]
    results = tuple(column[0] if gone else torch.stack(column) for column, gone in zip(columns, missing, strict=True))
    return results, tuple(None if gone else 0 for gone in missing)
