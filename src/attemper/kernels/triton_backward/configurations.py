"""How each kernel is cut and compiled: a fixed table by width and dtype, so that results do not depend on what was timed."""

from typing import Any, NamedTuple

import torch

from attemper.kernels.triton_problem import NO_MASK


class Configuration(NamedTuple):
    """Rows and keys of a tile, warps of a program, and stages of its loads."""

    rows: int
    keys: int
    warps: int
    stages: int


# By the width of a head, padded to a power of two: the first entry that is wide enough serves. Where a call has more than one of
# the options that want registers, the second table does.
_SIXTEEN_BIT = {
    "query_gradients": {64: Configuration(64, 64, 4, 2), 128: Configuration(64, 64, 8, 2), 256: Configuration(32, 32, 8, 1)},
    "key_gradients": {64: Configuration(32, 64, 4, 2), 128: Configuration(32, 64, 8, 2), 256: Configuration(32, 32, 8, 1)},
    "mask_gradients": {64: Configuration(32, 32, 8, 1), 128: Configuration(16, 32, 8, 1), 256: Configuration(32, 32, 8, 1)},
}
_SIXTEEN_BIT_WITH_OPTIONS = {
    "query_gradients": {128: Configuration(32, 32, 8, 1), 256: Configuration(32, 32, 8, 1)},
    "key_gradients": {128: Configuration(32, 32, 8, 1), 256: Configuration(32, 32, 8, 1)},
    "mask_gradients": {64: Configuration(32, 32, 8, 1), 128: Configuration(16, 32, 8, 1), 256: Configuration(32, 32, 8, 1)},
}
_CAREFUL = {
    "query_gradients": {256: Configuration(16, 32, 8, 1)},
    "key_gradients": {256: Configuration(16, 16, 8, 1)},
}
_FLOAT32 = {
    "query_gradients": {128: Configuration(32, 32, 8, 1), 256: Configuration(16, 16, 8, 1)},
    "key_gradients": {64: Configuration(32, 32, 4, 1), 128: Configuration(32, 32, 8, 1), 256: Configuration(16, 16, 8, 1)},
    "mask_gradients": {128: Configuration(32, 32, 8, 1), 256: Configuration(16, 16, 8, 1)},
}
ROWS_OF_CONSTANTS = 32

# Otherwise the assembler keeps some registers in memory so that one more program fits beside. AMD's compiler has no such option.
REGISTERS = {} if torch.version.hip else {"maxnreg": 255}


def configuration(kernel: str, arguments: dict[str, Any], dtype: torch.dtype) -> Configuration:
    """How a kernel is cut and compiled.

    Args:
        kernel: "query_gradients", "key_gradients" or "mask_gradients"; arguments: what it is given, by name; dtype: of the query.
    """
    of_entropy = arguments["d_entropy"] is not None
    width = max(arguments["BLOCK_D"], arguments["BLOCK_V"])
    options = sum((arguments["MASK"] != NO_MASK, arguments["DROPOUT"], arguments["SOFTCAP"], of_entropy))
    crowded = options > 1 or (kernel == "key_gradients" and of_entropy and width > 64)
    sixteen = _SIXTEEN_BIT_WITH_OPTIONS if crowded else _SIXTEEN_BIT
    table = (_CAREFUL if arguments["CAREFUL"] else _FLOAT32 if dtype == torch.float32 else sixteen)[kernel]
    cut = table[min(each for each in table if each >= width)]
    # Two stages leave no registers where a tile is wider than the head, and so is loaded by a condition on each column, nor
    # beside the terms of the entropy.
    padded = (arguments["BLOCK_D"], arguments["BLOCK_V"]) != (arguments["WIDTH"], arguments["VALUE_WIDTH"])
    full = padded or of_entropy
    return cut._replace(stages=1) if full else cut
