"""How each kernel may be cut and compiled: by a fixed table of width and dtype, and beside it what a GPU may like better."""

from typing import Any

import torch

from attemper.kernels.triton_problem import NO_MASK
from attemper.kernels.triton_tuning import Cut

# By the width of a head, padded to a power of two: the first entry that is wide enough serves. Where a call has more than one of
# the options that want registers, the second table does.
_SIXTEEN_BIT = {
    "query_gradients": {64: Cut(64, 64, 4, 2), 128: Cut(64, 64, 8, 2), 256: Cut(32, 32, 8, 1)},
    "key_gradients": {64: Cut(32, 64, 4, 2), 128: Cut(32, 64, 8, 2), 256: Cut(32, 32, 8, 1)},
    "mask_gradients": {64: Cut(32, 32, 8, 1), 128: Cut(16, 32, 8, 1), 256: Cut(32, 32, 8, 1)},
}
_SIXTEEN_BIT_WITH_OPTIONS = {
    "query_gradients": {128: Cut(32, 32, 8, 1), 256: Cut(32, 32, 8, 1)},
    "key_gradients": {128: Cut(32, 32, 8, 1), 256: Cut(32, 32, 8, 1)},
    "mask_gradients": {64: Cut(32, 32, 8, 1), 128: Cut(16, 32, 8, 1), 256: Cut(32, 32, 8, 1)},
}
_CAREFUL = {
    "query_gradients": {256: Cut(16, 32, 8, 1)},
    "key_gradients": {256: Cut(16, 16, 8, 1)},
}
_FLOAT32 = {
    "query_gradients": {128: Cut(32, 32, 8, 1), 256: Cut(16, 16, 8, 1)},
    "key_gradients": {64: Cut(32, 32, 4, 1), 128: Cut(32, 32, 8, 1), 256: Cut(16, 16, 8, 1)},
    "mask_gradients": {128: Cut(32, 32, 8, 1), 256: Cut(16, 16, 8, 1)},
}
# What is timed against an entry of the first table.
_OTHERS: dict[str, dict[int, tuple[Cut, ...]]] = {
    "query_gradients": {64: (Cut(64, 32, 4, 2),), 128: (Cut(64, 32, 8, 2),), 256: ()},
    "key_gradients": {64: (Cut(64, 32, 4, 2),), 128: (Cut(32, 32, 8, 2),), 256: ()},
    "mask_gradients": {256: ()},
}
ROWS_OF_CONSTANTS = 32

# Otherwise the assembler keeps some registers in memory so that one more program fits beside. AMD's compiler has no such option.
REGISTERS = {} if torch.version.hip else {"maxnreg": 255}


def configurations(kernel: str, arguments: dict[str, Any], dtype: torch.dtype) -> list[Cut]:
    """How a kernel may be cut and compiled, the first by the table.

    Args:
        kernel: "query_gradients", "key_gradients" or "mask_gradients"; arguments: what it is given, by name; dtype: of the query.
    """
    of_entropy = arguments["d_entropy"] is not None
    width = max(arguments["BLOCK_D"], arguments["BLOCK_V"])
    options = sum((arguments["MASK"] != NO_MASK, arguments["DROPOUT"], arguments["SOFTCAP"], of_entropy))
    padded = (arguments["BLOCK_D"], arguments["BLOCK_V"]) != (arguments["WIDTH"], arguments["VALUE_WIDTH"])
    crowded = options > 1 or (of_entropy and width > 64 and (padded or kernel == "key_gradients"))
    table = _CAREFUL if arguments["CAREFUL"] else _FLOAT32 if dtype == torch.float32 else _SIXTEEN_BIT
    if table is _SIXTEEN_BIT and crowded:
        table = _SIXTEEN_BIT_WITH_OPTIONS
    cut = _of_width(table[kernel], width)
    if table is _SIXTEEN_BIT_WITH_OPTIONS and padded and options > 1 and width > 64 and kernel == "key_gradients":
        cut = cut._replace(rows=16)
    # Two stages leave no registers where a tile is wider than the head, and so is loaded by a condition on each column, nor
    # beside the terms of the entropy.
    full = padded or of_entropy
    # Nor has a tile of more rows registers for these terms, in heads of 32.
    choice = table is _SIXTEEN_BIT and not (of_entropy and kernel == "key_gradients")
    others = _of_width(_OTHERS[kernel], width) if choice else ()
    return [each._replace(stages=1) if full else each for each in (cut, *others)]


def _of_width(table: dict[int, Any], width: int) -> Any:
    return table[min(each for each in table if each >= width)]
