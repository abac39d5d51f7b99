"""The backward pass: which kernels run, in which order, and what is left to do with the sums of each row."""

import math
from typing import Any

import torch
from torch import Tensor

from attemper.kernels.spec import Forward, Gradients, Inputs, Needs, Rules, Upstream
from attemper.kernels.triton_backward.configurations import ROWS_OF_CONSTANTS, configuration
from attemper.kernels.triton_problem import NO_MASK, Launch, arguments

# Weights below 2^-14 lose digits in float16: between the softmax and the product with what flows in they are so much larger.
_LIFT = 1024.0
_MOST_LIFTED = 32.0


def backward(inputs: Inputs, rules: Rules, result: Forward, upstream: Upstream, needs: Needs) -> Gradients:
    """The gradients that are wanted.

    With D = Σ o·do of the row: dz = p·(dp − D + g_lse − g_entropy·(ln p + H)), then back through the cap, the scale and q·k.
    """
    query, key, value, mask, scale, sinks = inputs
    assert result.figures is not None
    shared = _Shared(inputs, rules, result, upstream)
    works = result.lse.numel() > 0 and key.shape[-2] > 0

    def empty(need: bool, like: Tensor | None) -> Tensor | None:
        if not need or like is None:
            return None
        return torch.empty(like.shape, dtype=like.dtype, device=like.device) if works else like.new_zeros(like.shape)

    d_query, d_key, d_value, d_mask = (empty(needs[i], inputs[i]) for i in range(4))
    # The forward pass rounds weights of 16 bits before they meet the values, and D = Σ o·do with them. Gradients in float want
    # better: two more sums give D again, and what its error does to the first.
    again = query.dtype != torch.float32 and upstream.output is not None and (needs.scale or needs.sinks or needs.mask)
    sums = None
    if needs.scale or again:
        rows = (3 if again else 1, *result.lse.shape)
        sums = torch.empty(rows, device=query.device) if works else scale.new_zeros(rows, dtype=torch.float32)
    if works:
        shared.find_constants()
        if d_query is not None or sums is not None:
            shared.launch_queries(d_query, sums)
        if d_key is not None or d_value is not None:
            shared.launch_keys(d_key, d_value)
    else:
        shared.constant.copy_(torch.zeros_like(result.lse) if shared.d_lse is None else shared.d_lse)
    if again and sums is not None and works:
        shared.correct(sums)
    if works and d_mask is not None:
        shared.launch_mask(d_mask)
    return Gradients(
        d_query,
        d_key,
        d_value,
        d_mask,
        shared.scale_gradient(sums[0]) if needs.scale and sums is not None else None,
        shared.sinks_gradient(sinks) if needs.sinks and sinks is not None else None,
    )


class _Shared:
    """What the kernels of one backward pass share, by the names of their arguments."""

    def __init__(self, inputs: Inputs, rules: Rules, result: Forward, upstream: Upstream) -> None:
        assert result.figures is not None
        self.inputs, self.result, self.figures = inputs, result, result.figures
        self.d_output = None if upstream.output is None or inputs.value is None else upstream.output.resolve_neg()
        self.d_lse, self.d_entropy = (
            None if each is None else each.resolve_neg().to(torch.float32).contiguous() for each in upstream[1:]
        )
        self.constant = torch.empty(result.lse.shape, device=inputs.query.device)
        self.rows = inputs.shape[2]
        flow = (0, 0, 0, 0) if self.d_output is None else self.d_output.stride()
        self.arguments: dict[str, Any] = {
            **arguments(inputs, rules),
            "figures": self.figures,
            "entropy": result.entropy,
            "constant": self.constant,
            "d_output": self.d_output,
            "d_lse": self.d_lse,
            "d_entropy": self.d_entropy,
            "figure_stride": result.lse.numel(),
            "CAREFUL": False,
            **dict(zip(("flow_batch", "flow_head", "flow_row", "flow_column"), flow, strict=True)),
        }

        self.hides = self.arguments["LEFT"] or self.arguments["RIGHT"] or self.arguments["MASK"] != NO_MASK

    def find_constants(self) -> None:
        """g_lse − Σ o·do of each row."""
        from attemper.kernels.triton_backward.constants import row_constants

        output = self.result.output if self.result.unrounded is None else self.result.unrounded
        own = {"output": None if self.d_output is None else output, "BLOCK_M": ROWS_OF_CONSTANTS}
        self._launch(row_constants, self._row_blocks(ROWS_OF_CONSTANTS), own, {"num_warps": 4})

    def launch_queries(self, d_query: Tensor | None, sums: Tensor | None) -> None:
        """The gradient of the queries and the sums of each row."""
        from attemper.kernels.triton_backward.queries import query_gradients

        own = {"d_query": d_query, "sums": sums, "SUMS": 0 if sums is None else len(sums)}
        self._launch_tiles(query_gradients, own, lambda m, _: self._row_blocks(m))
        if d_query is not None and self.hides:
            self._launch_tiles(query_gradients, {**own, "SUMS": 0, "CAREFUL": True}, lambda m, _: self._row_blocks(m))

    def launch_keys(self, d_key: Tensor | None, d_value: Tensor | None) -> None:
        """The gradients of the keys and values."""
        from attemper.kernels.triton_backward.keys import key_gradients

        key = self.inputs.key
        if self.d_output is None and d_value is not None:
            d_value.zero_()
            d_value = None
        lifts = key.dtype == torch.float16 and self.arguments["keep_factor"] <= _MOST_LIFTED
        own = {"d_key": d_key, "d_value": d_value, "LIFT": _LIFT if lifts else 1.0}
        if d_key is not None or d_value is not None:
            for careful in (False, True) if self.hides else (False,):
                own["CAREFUL"] = careful
                self._launch_tiles(key_gradients, own, lambda _, n: key.shape[0] * key.shape[1] * _blocks(key.shape[2], n))

    def launch_mask(self, d_mask: Tensor) -> None:
        """The gradient of a float mask."""
        from attemper.kernels.triton_backward.masks import mask_gradients

        sizes = dict(zip(("mask_batches", "mask_heads", "mask_queries", "mask_keys"), d_mask.shape, strict=True))
        own = {"d_mask": d_mask, "batches": self.inputs.shape[0], **sizes}
        planes, rows, keys = d_mask.shape[0] * d_mask.shape[1], d_mask.shape[2], d_mask.shape[3]
        self._launch_tiles(mask_gradients, own, lambda m, n: planes * _blocks(rows, m) * _blocks(keys, n))

    def correct(self, sums: Tensor) -> None:
        """Put the constant of each row right by Σ p·dp, and Σ dz·(u − pivot) with it; sums is changed."""
        from_pivot, flowing, swinging = sums.double()
        exact = -flowing if self.d_lse is None else self.d_lse.double() - flowing
        sums[0] = from_pivot + (exact - self.constant) * swinging
        self.constant.copy_(exact)

    def scale_gradient(self, from_pivot: Tensor) -> Tensor:
        """ds = Σ dz·(u − pivot) + pivot·Σ dz, in the shape of the scale; Σ dz is the gradient of lse, exactly, where there is a pivot."""
        of_rows, scale = from_pivot.double(), self.inputs.scale
        if self.d_lse is not None:
            of_rows = of_rows + torch.where(self.result.lse == -math.inf, 0.0, self.d_lse.double() * self.figures[2])
        return of_rows.sum_to_size(scale.shape).to(scale.dtype)

    def sinks_gradient(self, sinks: Tensor) -> Tensor:
        """The gradient of the sinks' logits, [heads]: of weights without a value, so dp is 0."""
        shift, log_total, _ = self.figures
        shifted = sinks.unsqueeze(-1) - shift - log_total
        weight, flow = torch.exp(shifted), self.constant
        if self.d_entropy is not None:
            flow = flow - self.d_entropy * torch.where(weight == 0.0, 0.0, shifted + self.result.entropy)
        return (weight * flow).sum((0, 2), dtype=torch.float64).to(sinks.dtype)

    def _row_blocks(self, size: int) -> int:
        batch, heads, queries, _ = self.inputs.shape
        return batch * heads * _blocks(queries, size)

    def _launch_tiles(self, kernel: Any, own: dict[str, Any], programs: Any) -> None:
        rows, keys, warps, stages = configuration(kernel.fn.__name__, {**self.arguments, **own}, self.inputs.query.dtype)
        own = {**own, "BLOCK_M": rows, "BLOCK_N": keys}
        self._launch(kernel, programs(rows, keys), own, {"num_warps": warps, "num_stages": stages})

    def _launch(self, kernel: Any, programs: int, own: dict[str, Any], options: dict[str, int]) -> None:
        given = {**self.arguments, **own}
        Launch(kernel, (programs,), {name: given[name] for name in kernel.arg_names}, options).run()


def _blocks(length: int, size: int) -> int:
    return -(-length // size)
