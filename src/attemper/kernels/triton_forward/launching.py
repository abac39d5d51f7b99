"""How a problem is cut for the forward kernels, and the calls of them."""

from typing import NamedTuple

import torch

from attemper.kernels.spec import Forward, Inputs, Rules
from attemper.kernels.triton_forward.attend import attend, join
from attemper.kernels.triton_problem import FIGURES, FLOAT_MASK, Launch, arguments

# Rows up to which the heads that share a key head are packed into one block.
_FEW_ROWS = 16
# The keys are dealt to several programs where there would be fewer than this: two for each multiprocessor of a large GPU. It
# follows from the shape alone, so that results do not depend on the GPU.
_PROGRAMS_WANTED = 256
_LEAST_KEYS_OF_SPLIT = 256
_MOST_SPLITS = 64
_JOINED_ROWS = 16


class Blocks(NamedTuple):
    """Rows and keys of a tile, and how the kernel for it is compiled."""

    rows: int
    keys: int
    warps: int
    stages: int


# Small: it runs where a value is not finite, and has four products to hold.
_MENDING = Blocks(32, 32, 8, 1)


def blocks_of(dtype: torch.dtype, width: int, rows: int, *, statistics: bool, laden: bool) -> Blocks:
    """The tile for a width of head, the larger of query's and value's, and so many rows.

    Args: laden: whether there is a softcap, a float mask or dropout.

    No kernel in 16 bits up to a width of 128 may keep registers in memory, see docs/kernels-triton.md. As many rows as the width
    at least: otherwise Triton deals the keys of a tile to the warps, and every sum over a row has to cross them.
    """
    if rows <= _FEW_ROWS:
        return Blocks(16, 64, 4, 3) if width <= 128 else Blocks(16, 32, 4, 2)
    if dtype == torch.float32:
        return Blocks(32, 32, 4, 1)
    if width <= 64:
        return Blocks(64, 32 if statistics else 64, 4, 2)
    if width <= 128:
        # Where memory on the device is wider than the head, telling which part is there takes registers too.
        return Blocks(128, 16 if laden or (statistics and width < 128) else 32, 8, 2)
    return Blocks(64, 32, 8, 1)


def forward(inputs: Inputs, rules: Rules, *, statistics: bool, differentiable: bool) -> Forward:
    """softmax(z) v and the record of z. Without statistics the entropy is NaN: it would cost time, and nobody has asked."""
    result, calls = launches(inputs, rules, statistics=statistics, differentiable=differentiable)
    for call in calls:
        call.run()
    return result


def launches(inputs: Inputs, rules: Rules, *, statistics: bool, differentiable: bool) -> tuple[Forward, list[Launch]]:
    """The results, not written yet, and the calls that write them."""
    query, _, value, _, scale, sinks = inputs
    batch, heads, queries, keys = inputs.shape
    output = None if value is None else query.new_empty(*query.shape[:3], value.shape[-1])
    lse, entropy = scale.new_empty(batch, heads, queries), scale.new_empty(batch, heads, queries)
    rest = scale.new_empty(10, batch, heads, queries) if statistics else None
    figures = scale.new_empty(FIGURES, batch, heads, queries) if differentiable else None
    # The backward pass wants the output unrounded: D = Σ o·do would inherit its rounding.
    unrounded = None
    if differentiable and output is not None and output.dtype != scale.dtype:
        unrounded = torch.empty_like(output, dtype=scale.dtype)
    result = Forward(output, lse, entropy, rest, figures, unrounded)
    rows = lse.numel()
    if not rows:
        return result, []

    given = arguments(inputs, rules)
    groups = given["groups"]
    packed = groups > 1 and queries <= _FEW_ROWS
    heads_apart, rows_of_program = (heads // groups, groups * queries) if packed else (heads, queries)
    width = max(given["WIDTH"], given["VALUE_WIDTH"])
    laden = given["SOFTCAP"] or given["DROPOUT"] or given["MASK"] == FLOAT_MASK
    cut = blocks_of(query.dtype, width, rows_of_program, statistics=statistics, laden=laden)
    blocks = -(-rows_of_program // cut.rows)
    programs = batch * heads_apart * blocks
    splits = _splits(programs, keys)
    split = splits > 1
    parts = scale.new_empty(splits, rows, value.shape[-1]) if split and value is not None else None
    sums = scale.new_empty(11, splits, rows) if split else None
    counts = torch.empty(2, splits, rows, dtype=torch.int32, device=query.device) if split else None
    written = {"unrounded": unrounded, "lse": lse, "entropy": entropy, "rest": rest, "figures": figures, "rows": rows}
    between = {"sums_of_splits": sums, "counts_of_splits": counts}
    to_attend = {
        **given,
        **written,
        **between,
        "output": parts if split else output,
        "blocks": blocks,
        "splits": splits,
        "STATISTICS": statistics,
        "PACKED": packed,
        "SPLIT": split,
        "MEND": False,
        "BLOCK_M": cut.rows,
        "BLOCK_N": cut.keys,
    }
    calls = [Launch(attend, (programs * splits,), to_attend, _options(cut))]
    if split:
        names = ("scale", "scale_batch", "scale_head", "scale_row", "sinks", "queries", "heads", "keep_factor")
        capitals = ("VALUE_WIDTH", "BLOCK_V", "SOFTCAP", "DROPOUT")
        to_join = {
            **{name: given[name] for name in (*names, *capitals)},
            **written,
            **between,
            "output_of_splits": parts,
            "output": output,
            "splits": splits,
            "STATISTICS": statistics,
            "PLAIN": given["MASK"] != FLOAT_MASK and not given["SOFTCAP"],
            "PIVOT": given["MASK"] == FLOAT_MASK and not given["SOFTCAP"] and sinks is None and differentiable,
            "BLOCK_M": _JOINED_ROWS,
        }
        calls.append(Launch(join, (-(-rows // _JOINED_ROWS),), to_join, {"num_warps": 4, "num_stages": 1}))
    if output is not None and (given["MASK"] or given["LEFT"] or given["RIGHT"]):
        nothing = dict.fromkeys(("lse", "entropy", "rest", "figures", "sums_of_splits", "counts_of_splits"))
        blocks = -(-rows_of_program // _MENDING.rows)
        to_mend = {
            **to_attend,
            **nothing,
            "output": output,
            "blocks": blocks,
            "splits": 1,
            "STATISTICS": False,
            "SPLIT": False,
            "MEND": True,
            "BLOCK_M": _MENDING.rows,
            "BLOCK_N": _MENDING.keys,
        }
        calls.append(Launch(attend, (batch * heads_apart * blocks,), to_mend, _options(_MENDING)))
    return result, calls


def _options(cut: Blocks) -> dict[str, int]:
    return {"num_warps": cut.warps, "num_stages": cut.stages}


def _splits(programs: int, keys: int) -> int:
    return max(1, min(-(-_PROGRAMS_WANTED // programs), keys // _LEAST_KEYS_OF_SPLIT, _MOST_SPLITS))
