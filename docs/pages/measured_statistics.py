"""Every statistic of rows whose logits are normal, over the standard deviation: what the pages' pictures show."""

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from attemper import RowStats
from docs.pages.statistic_texts import Statistic

KEYS = (64, 512, 4096)
DEVIATIONS = tuple(2.0 ** (power / 2) for power in range(-4, 11))  # 0.25 to 32
SCALE = 0.125  # of the products behind the logits: 1/√64
_ROWS = 200


def value_of(rows: RowStats, statistic: Statistic) -> Tensor:
    """A statistic of each row, as a reader gets it.

    Args:
        rows: [..., heads, queries]; statistic: which one. A method that takes a dtype is asked about float16.
    """
    found = getattr(rows, statistic.name)
    return (found(torch.float16) if statistic.argument else found()) if callable(found) else found


@functools.cache
def records() -> Mapping[int, tuple[RowStats, ...]]:
    """For each number of keys a record for each standard deviation: the same normal numbers, stretched.

    Returns:
        number of keys → records of [1, rows].
    """
    generator = torch.Generator().manual_seed(0)
    made = {}
    for keys in KEYS:
        normal = torch.randn(1, _ROWS, keys, generator=generator)
        made[keys] = tuple(RowStats.from_logits(normal * each, products=normal * (each / SCALE)) for each in DEVIATIONS)
    return made


def means(statistic: Statistic) -> dict[int, list[float]]:
    """The mean over rows at each standard deviation, by the number of keys."""
    return {keys: [value_of(rows, statistic).double().mean().item() for rows in of_keys] for keys, of_keys in records().items()}


def extremes(keys: int = 512) -> dict[str, RowStats]:
    """One row each of uniform weights (all logits 1), of one-hot weights (one logit of 200, the others 0), and without a key."""
    ones, one_hot = torch.ones(1, 1, keys), torch.zeros(1, 1, keys)
    one_hot[..., 0] = 200.0  # the others' weights are 0 in float32 too
    nothing = torch.zeros(1, 1, keys, dtype=torch.bool)
    make: Callable[..., RowStats] = RowStats.from_logits
    return {
        "uniform": make(ones, products=ones / SCALE),
        "one_hot": make(one_hot, products=one_hot / SCALE),
        "empty": make(ones, nothing, products=ones / SCALE),
    }
