"""How a problem is cut for the forward kernels, and the calls of them."""

from typing import Any

import torch

from attemper.kernels.spec import Forward, Inputs, Rules
from attemper.kernels.triton_forward.attend import attend, join
from attemper.kernels.triton_problem import FIGURES, FLOAT_MASK, Launch, arguments
from attemper.kernels.triton_tuning import TUNER, Cut, key_of

# Rows up to which the heads that share a key head are packed into one block.
_FEW_ROWS = 16
# The keys are dealt to several programs where there would be fewer than this: two for each multiprocessor of a large GPU. It
# follows from the shape alone, so that results do not depend on the GPU.
_PROGRAMS_WANTED = 256
_LEAST_KEYS_OF_SPLIT = 256
_MOST_SPLITS = 64
_JOINED_ROWS = 16


# Small: it runs where a value is not finite, and has four products to hold.
_MENDING = Cut(32, 32, 8, 1)


def cuts_of(dtype: torch.dtype, width: int, rows: int, *, statistics: bool, laden: bool) -> list[Cut]:
    """The tiles that may serve a width of head, the larger of query's and value's, and so many rows; the first by a fixed table.

    Args: laden: whether there is a softcap, a float mask or dropout.

    No kernel in 16 bits up to a width of 128 may keep registers in memory, see docs/kernels-triton.md. As many rows as the width
    at least: otherwise Triton deals the keys of a tile to the warps, and every sum over a row has to cross them.
    """
    if rows <= _FEW_ROWS:
        return [Cut(16, 64, 4, 3) if width <= 128 else Cut(16, 32, 4, 2)]
    if dtype == torch.float32:
        return [Cut(32, 32, 4, 1)]
    if width <= 64:
        keys = 32 if statistics else 64
        return [Cut(64, keys, 4, 2), *([Cut(128, 32, 8, 2)] if laden else [Cut(128, keys, 8, 2), Cut(64, keys, 4, 3)])]
    if width <= 128:
        # Where memory on the device is wider than the head, telling which part is there takes registers too.
        keys = 16 if laden or (statistics and width < 128) else 32
        return [Cut(128, keys, 8, 2), *([] if laden else [Cut(128, keys, 8, 3)])]
    return [Cut(64, 32, 8, 1)]


def forward(inputs: Inputs, rules: Rules, *, statistics: bool, differentiable: bool) -> Forward:
    """softmax(z) v and the record of z. Without statistics the entropy is NaN: it would cost time, and nobody has asked."""
    work = _Work(inputs, rules, statistics, differentiable)
    for call in work.calls(work.chosen()):
        call.run()
    return work.result


def launches(
    inputs: Inputs, rules: Rules, *, statistics: bool, differentiable: bool, candidate: int = 0
) -> tuple[Forward, list[Launch]]:
    """The results, not written yet, and the calls that write them; candidate: which of the tiles they get, or the last."""
    work = _Work(inputs, rules, statistics, differentiable)
    return work.result, work.calls(work.cuts[min(candidate, len(work.cuts) - 1)])


class _Work:
    """One forward pass: what its kernels are given, the results that they write, and the tiles that may serve."""

    def __init__(self, inputs: Inputs, rules: Rules, statistics: bool, differentiable: bool) -> None:
        query, _, value, _, scale, _ = inputs
        batch, heads, queries, _ = inputs.shape
        output = None if value is None else query.new_empty(*query.shape[:3], value.shape[-1])
        lse, entropy = scale.new_empty(batch, heads, queries), scale.new_empty(batch, heads, queries)
        rest = scale.new_empty(10, batch, heads, queries) if statistics else None
        figures = scale.new_empty(FIGURES, batch, heads, queries) if differentiable else None
        # The backward pass wants the output unrounded: D = Σ o·do would inherit its rounding.
        unrounded = None
        if differentiable and output is not None and output.dtype != scale.dtype:
            unrounded = torch.empty_like(output, dtype=scale.dtype)
        self.inputs, self.rows = inputs, lse.numel()
        self.result = Forward(output, lse, entropy, rest, figures, unrounded)
        given = arguments(inputs, rules)
        groups = given["groups"]
        packed = groups > 1 and queries <= _FEW_ROWS
        self.heads_apart, self.rows_apart = (heads // groups, groups * queries) if packed else (heads, queries)
        written = {"unrounded": unrounded, "lse": lse, "entropy": entropy, "rest": rest, "figures": figures, "rows": self.rows}
        self.given = {**given, **written, "output": output, "STATISTICS": statistics, "PACKED": packed}
        laden = given["SOFTCAP"] or given["DROPOUT"] or given["MASK"] == FLOAT_MASK
        width = max(given["WIDTH"], given["VALUE_WIDTH"])
        self.cuts = cuts_of(query.dtype, width, self.rows_apart, statistics=statistics, laden=laden)

    def chosen(self) -> Cut:
        """The tile for this call."""
        if not self.rows:
            return self.cuts[0]
        query = self.inputs.query
        return TUNER.choose(self.cuts, lambda: key_of("attend", self.given, query.dtype, self.rows), self.calls, query)

    def calls(self, cut: Cut) -> list[Launch]:
        """What runs: the pass over the keys; where these are dealt out, what joins them; and what mends an output that is NaN."""
        if not self.rows:
            return []
        given, value, scale = self.given, self.inputs.value, self.inputs.scale
        blocks = -(-self.rows_apart // cut.rows)
        programs = self.inputs.query.shape[0] * self.heads_apart * blocks
        splits = _splits(programs, self.inputs.shape[3])
        split = splits > 1
        parts = scale.new_empty(splits, self.rows, value.shape[-1]) if split and value is not None else None
        between = {
            "sums_of_splits": scale.new_empty(11, splits, self.rows) if split else None,
            "counts_of_splits": torch.empty(2, splits, self.rows, dtype=torch.int32, device=scale.device) if split else None,
        }
        to_attend = {
            **given,
            **between,
            "output": parts if split else given["output"],
            "blocks": blocks,
            "splits": splits,
            "SPLIT": split,
            "MEND": False,
            "BLOCK_M": cut.rows,
            "BLOCK_N": cut.keys,
        }
        calls = [Launch(attend, (programs * splits,), to_attend, cut.options)]
        if split:
            calls.append(self._join({**between, "output_of_splits": parts, "splits": splits}))
        if given["output"] is not None and (given["MASK"] or given["LEFT"] or given["RIGHT"]):
            calls.append(self._mend(to_attend))
        return calls

    def _join(self, between: dict[str, Any]) -> Launch:
        given = self.given
        float_mask = given["MASK"] == FLOAT_MASK
        own = {
            "PLAIN": not float_mask and not given["SOFTCAP"],
            "PIVOT": float_mask and not given["SOFTCAP"] and given["sinks"] is None and given["figures"] is not None,
            "BLOCK_M": _JOINED_ROWS,
        }
        everything = {**given, **between, **own}
        to_join = {name: everything[name] for name in join.arg_names}
        return Launch(join, (-(-self.rows // _JOINED_ROWS),), to_join, {"num_warps": 4, "num_stages": 1})

    def _mend(self, to_attend: dict[str, Any]) -> Launch:
        blocks = -(-self.rows_apart // _MENDING.rows)
        to_mend = {
            **to_attend,
            **dict.fromkeys(("lse", "entropy", "rest", "figures", "sums_of_splits", "counts_of_splits")),
            "output": self.given["output"],
            "blocks": blocks,
            "splits": 1,
            "STATISTICS": False,
            "SPLIT": False,
            "MEND": True,
            "BLOCK_M": _MENDING.rows,
            "BLOCK_N": _MENDING.keys,
        }
        programs = self.inputs.query.shape[0] * self.heads_apart * blocks
        return Launch(attend, (programs,), to_mend, _MENDING.options)


def _splits(programs: int, keys: int) -> int:
    return max(1, min(-(-_PROGRAMS_WANTED // programs), keys // _LEAST_KEYS_OF_SPLIT, _MOST_SPLITS))
