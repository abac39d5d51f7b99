"""How each kernel is cut and compiled: a fixed table by width and dtype, so that results do not depend on what was timed."""

from typing import NamedTuple

import torch


class Configuration(NamedTuple):
    """Rows and keys of a tile, warps of a program, and stages of its loads."""

    rows: int
    keys: int
    warps: int
    stages: int


# By the wider of the two widths of a head, padded to a power of two: the first entry that is wide enough serves.
_SIXTEEN_BIT = {
    "query_gradients": {64: Configuration(64, 64, 4, 2), 128: Configuration(64, 32, 4, 2), 256: Configuration(64, 32, 8, 1)},
    "key_gradients": {64: Configuration(32, 64, 4, 2), 128: Configuration(32, 64, 8, 2), 256: Configuration(32, 32, 8, 1)},
    "mask_gradients": {64: Configuration(32, 32, 4, 2), 128: Configuration(32, 32, 4, 1), 256: Configuration(32, 32, 8, 1)},
}
_FLOAT32 = {
    "query_gradients": {64: Configuration(32, 32, 4, 1), 128: Configuration(32, 32, 8, 1), 256: Configuration(16, 16, 8, 1)},
    "key_gradients": {64: Configuration(32, 32, 4, 1), 128: Configuration(32, 32, 8, 1), 256: Configuration(16, 16, 8, 1)},
    "mask_gradients": {64: Configuration(32, 32, 4, 1), 128: Configuration(32, 32, 4, 1), 256: Configuration(16, 16, 4, 1)},
}
ROWS_OF_CONSTANTS = 32


def configuration(kernel: str, width: int, dtype: torch.dtype) -> Configuration:
    """How a kernel is cut and compiled.

    Args:
        kernel: "query_gradients", "key_gradients" or "mask_gradients"; width: the wider of BLOCK_D and BLOCK_V.
    """
    table = (_FLOAT32 if dtype == torch.float32 else _SIXTEEN_BIT)[kernel]
    return table[min(each for each in table if each >= width)]
