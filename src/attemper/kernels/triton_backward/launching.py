"""The backward pass: which kernels run, in which order, and what is left to do with the sums of each row."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attemper.kernels.spec import Forward, Gradients, Inputs, Needs, Rules, Upstream
from attemper.kernels.triton_backward.configurations import REGISTERS, ROWS_OF_CONSTANTS, configurations
from attemper.kernels.triton_backward.constants import row_constants
from attemper.kernels.triton_backward.keys import key_gradients
from attemper.kernels.triton_backward.masks import mask_gradients
from attemper.kernels.triton_backward.queries import query_gradients
from attemper.kernels.triton_problem import NO_MASK, Launch, arguments
from attemper.kernels.triton_tuning import TUNER, Cut, key_of

# Weights below 2^-14 lose digits in float16: between the softmax and the product with what flows in they are so much larger.
_LIFT = 1024.0
_MOST_LIFTED = 32.0


def backward(inputs: Inputs, rules: Rules, result: Forward, upstream: Upstream, needs: Needs) -> Gradients:
    """The gradients that are wanted.

    With D = Σ o·do of the row: dz = p·(dp − D + g_lse − g_entropy·(ln p + H)), then back through the cap, the scale and q·k.
    """
    work = _Work(inputs, rules, result, upstream, needs)
    for call in work.before():
        call.run()
    work.correct()
    for call in work.after():
        call.run()
    return work.gradients()


def launches(
    inputs: Inputs, rules: Rules, result: Forward, upstream: Upstream, needs: Needs, *, candidate: int = 0
) -> list[Launch]:
    """The calls of kernels that `backward` makes, in order; candidate: which of its tiles each gets, or the last."""
    work = _Work(inputs, rules, result, upstream, needs, candidate)
    return [*work.before(), *work.after()]


class _Work:
    """One backward pass: what its kernels share, by the names of their arguments, and the gradients that they write."""

    def __init__(
        self, inputs: Inputs, rules: Rules, result: Forward, upstream: Upstream, needs: Needs, candidate: int | None = None
    ) -> None:
        assert result.figures is not None
        self.candidate = candidate  # None: what the tuner chooses
        self.inputs, self.result, self.needs, self.figures = inputs, result, needs, result.figures
        self.works = result.lse.numel() > 0 and inputs.key.shape[-2] > 0
        # Autograd may hand on a gradient whose sign is yet to be turned; a kernel reads memory.
        d_output = None if upstream.output is None or inputs.value is None else upstream.output.resolve_neg()
        self.d_lse, self.d_entropy = (
            None if each is None else each.resolve_neg().to(torch.float32).contiguous() for each in upstream[1:]
        )
        flow = (0, 0, 0, 0) if d_output is None else d_output.stride()
        wanted = zip(inputs[:4], needs[:4], strict=True)
        self.d_query, self.d_key, self.d_value, self.d_mask = (self._empty(*each) for each in wanted)
        # The forward pass rounds weights to 16 bits before they meet the values, and D = Σ o·do with them. Gradients in float
        # want better: two more sums give D again, and what its error does to the first.
        again = inputs.query.dtype != torch.float32 and d_output is not None and (needs.scale or needs.sinks or needs.mask)
        output = result.output if result.unrounded is None else result.unrounded
        self.sums = None
        if needs.scale or again:
            self.sums = inputs.scale.new_empty(3 if again else 1, *result.lse.shape)
        self.given: dict[str, Any] = {
            **arguments(inputs, rules),
            **dict(zip(("flow_batch", "flow_head", "flow_row", "flow_column"), flow, strict=True)),
            # A hook on saved tensors may have laid it out anew.
            "output": None if d_output is None or output is None else output.contiguous(),
            "figures": result.figures,
            "figure_stride": result.lse.numel(),
            "entropy": result.entropy,
            "constant": inputs.scale.new_empty(result.lse.shape),
            "d_output": d_output,
            "d_lse": self.d_lse,
            "d_entropy": self.d_entropy,
            "d_query": self.d_query,
            "sums": self.sums,
            "d_key": self.d_key,
            "d_value": self.d_value,
            "d_mask": self.d_mask,
            "CAREFUL": False,
        }
        given = self.given
        lifts = inputs.query.dtype == torch.float16 and given["keep_factor"] <= _MOST_LIFTED
        given["LIFT"] = _LIFT if lifts else 1.0
        # Where pairs may be hidden, 0 · NaN may have spoilt a gradient: what holds NaN is formed again, with care.
        self.rounds = (False, True) if given["LEFT"] or given["RIGHT"] or given["MASK"] != NO_MASK else (False,)

    def before(self) -> list[Launch]:
        """The constants of the rows, the gradients of queries, keys and values, and the sums of the rows."""
        batch, heads, queries, keys = self.inputs.shape
        if not self.works:
            return []
        programs = batch * heads * _blocks(queries, ROWS_OF_CONSTANTS)
        calls = [self._launch(row_constants, programs, {"BLOCK_M": ROWS_OF_CONSTANTS}, {"num_warps": 4, "num_stages": 1})]
        for careful in self.rounds:
            sums = None if careful else self.sums
            own = {"sums": sums, "SUMS": 0 if sums is None else len(sums), "CAREFUL": careful}
            if self.d_query is not None or sums is not None:
                calls.append(self._launch_tiles(query_gradients, own, lambda m, _: batch * heads * _blocks(queries, m)))
        pairs = batch * self.inputs.key.shape[1]
        if self.d_key is not None or self.d_value is not None:
            for careful in self.rounds:
                own = {"CAREFUL": careful}
                calls.append(self._launch_tiles(key_gradients, own, lambda _, n: pairs * _blocks(keys, n)))
        return calls

    def correct(self) -> None:
        """Put the constant of each row right by Σ p·dp, and Σ dz·(u − pivot) with it."""
        d_lse, constant = self.d_lse, self.given["constant"]
        if not self.works:
            constant.zero_() if d_lse is None else constant.copy_(d_lse)
            if self.sums is not None:
                self.sums.zero_()
        elif self.sums is not None and len(self.sums) == 3:
            from_pivot, flowing, swinging = self.sums.double()
            # Where one key holds all the weight, its gradient was formed without the constant.
            swinging = swinging.masked_fill(self.figures[1] == 0.0, 0.0)
            exact = -flowing if d_lse is None else d_lse.double() - flowing
            self.sums[0] = from_pivot + (exact - constant) * swinging
            constant.copy_(exact)

    def after(self) -> list[Launch]:
        """The gradient of a float mask, which wants the constants as exact as they get."""
        d_mask = self.d_mask
        if d_mask is None or not self.works:
            return []
        sizes = dict(zip(("mask_batches", "mask_heads", "mask_queries", "mask_keys"), d_mask.shape, strict=True))
        planes, rows, keys = d_mask.shape[0] * d_mask.shape[1], d_mask.shape[2], d_mask.shape[3]
        own = {"batches": self.inputs.shape[0], **sizes}
        return [self._launch_tiles(mask_gradients, own, lambda m, n: planes * _blocks(rows, m) * _blocks(keys, n))]

    def gradients(self) -> Gradients:
        """What was written, and what follows from the sums of the rows."""
        needs, sinks = self.needs, self.inputs.sinks
        return Gradients(
            self.d_query,
            self.d_key,
            self.d_value,
            self.d_mask,
            self._scale_gradient(self.sums[0]) if needs.scale and self.sums is not None else None,
            self._sinks_gradient(sinks) if needs.sinks and sinks is not None else None,
        )

    def _scale_gradient(self, from_pivot: Tensor) -> Tensor:
        """ds = Σ dz·(u − pivot) + pivot·Σ dz; where there is a pivot, Σ dz is the gradient of lse, exactly."""
        of_rows, scale = from_pivot.double(), self.inputs.scale
        if self.d_lse is not None:
            of_rows = of_rows + torch.where(self.result.lse == -math.inf, 0.0, self.d_lse.double() * self.figures[2])
        return of_rows.sum_to_size(scale.shape).to(scale.dtype)

    def _sinks_gradient(self, sinks: Tensor) -> Tensor:
        """The gradient of the sinks' logits, [heads]: of weights without a value, so dp is 0."""
        shift, log_total, _ = self.figures
        shifted = sinks.unsqueeze(-1) - shift - log_total
        weight, flow = torch.exp(shifted), self.given["constant"]
        if self.d_entropy is not None:
            flow = flow - self.d_entropy * torch.where(weight == 0.0, 0.0, shifted + self.result.entropy)
        return (weight * flow).sum((0, 2), dtype=torch.float64).to(sinks.dtype)

    def _empty(self, like: Tensor | None, need: bool) -> Tensor | None:
        if like is None or not need:
            return None
        return like.new_empty(like.shape) if self.works else like.new_zeros(like.shape)

    def _launch_tiles(self, kernel: Any, own: dict[str, Any], programs: Callable[[int, int], int]) -> Launch:
        given = {**self.given, **own}

        def launch(cut: Cut) -> Launch:
            tile = {**own, "BLOCK_M": cut.rows, "BLOCK_N": cut.keys}
            return self._launch(kernel, programs(cut.rows, cut.keys), tile, {**cut.options, **REGISTERS})

        query, name = self.inputs.query, kernel.__name__
        cuts = configurations(name, given, query.dtype)
        if self.candidate is not None:
            return launch(cuts[min(self.candidate, len(cuts) - 1)])
        rows = self.result.lse.numel()
        return launch(TUNER.choose(cuts, lambda: key_of(name, given, query.dtype, rows), lambda cut: [launch(cut)], query))

    def _launch(self, kernel: Any, programs: int, own: dict[str, Any], options: dict[str, int]) -> Launch:
        given = {**self.given, **own}
        return Launch(kernel, (programs,), {name: given[name] for name in kernel.arg_names}, options)


def _blocks(length: int, size: int) -> int:
    return -(-length // size)
