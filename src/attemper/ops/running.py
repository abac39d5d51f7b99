"""One run of a kernel on a checked problem: directly where that may be, else by an operator or under a transform."""

import torch
from torch import Tensor

from attemper.errors import UnsupportedError
from attemper.kernels import cpu
from attemper.kernels.spec import Inputs, Rules
from attemper.ops import operators
from attemper.ops.arguments import Problem
from attemper.ops.autocast import without_autocast
from attemper.ops.batching import nothing
from attemper.ops.differentiation import Attention
from attemper.ops.dispatch import compiling, may_pass_by, nobody_looks, transformed
from attemper.ops.flops import tell_flop_counters
from attemper.ops.implementations import KERNELS, choose
from attemper.ops.transforms import TransformedAttention
from attemper.stats import RowStats

_Results = tuple[Tensor | None, Tensor, Tensor, Tensor | None]


def run(problem: Problem, impl: str, *, statistics: bool) -> tuple[Tensor | None, RowStats | None]:
    """The output, None without values, and the record, None where statistics are not wanted; in the caller's dimensions."""
    inputs, rules = problem.inputs, problem.rules
    directly = may_pass_by(*inputs)
    kernel = choose(impl, inputs, seen=directly)
    # On the CPU whatever the default device is: the seed is a number of this process.
    seed = torch.randint(2**63 - 1, (), device="cpu") if rules.dropout_p > 0.0 else None
    if directly:
        output, lse, entropy, rest = _directly(kernel, inputs, rules, seed, statistics)
    else:
        output, lse, entropy, rest = _seen(kernel, inputs, rules, seed, statistics)
    output = None if output is None else problem.restore(output)
    return output, None if rest is None else problem.record(lse, entropy, rest)


def run_plainly(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, statistics: bool, impl: str
) -> Tensor | tuple[Tensor, RowStats] | None:
    """The plainest of calls by the shortest of ways, bit for bit what `run` gives; None where that is not for these arguments.

    The arguments are not checked yet: what does not fit is left to the long way, which says so.
    """
    if not nobody_looks() or impl not in ("auto", "cpu") or not isinstance(is_causal, bool) or torch.is_autocast_enabled("cpu"):
        return None
    found = cpu.plan(query, key, value, is_causal, statistics)
    if found is None:
        return None
    plan, addresses = found
    if (query.requires_grad or key.requires_grad or value.requires_grad) and torch.is_grad_enabled():
        inputs = Inputs(query, key, value, None, plan.scale, None)
        results = Attention.apply("cpu", Rules(is_causal=is_causal), statistics, *inputs)
    else:
        results = cpu.plain(plan, addresses, query, statistics)
    return (results[0], RowStats(results[1], results[2], results[3])) if statistics else results[0]


def _directly(kernel: str, inputs: Inputs, rules: Rules, seed: Tensor | None, statistics: bool) -> _Results:
    if seed is not None:
        rules = rules._replace(seed=int(seed))
    with without_autocast(inputs.query.device):
        if torch.is_grad_enabled() and _requires_grad(inputs):
            return Attention.apply(kernel, rules, statistics, *inputs)
        return KERNELS[kernel].forward(inputs, rules, statistics=statistics, differentiable=False)[:4]


def _seen(kernel: str, inputs: Inputs, rules: Rules, seed: Tensor | None, statistics: bool) -> _Results:
    query, key, value, mask, scale, sinks = inputs
    left, right = rules.sides
    if not compiling():
        tell_flop_counters()
    if value is None:
        numbers = (left, right, rules.offset, rules.softcap, rules.row_step)
        return None, *operators.row_stats(query, key, mask, scale, sinks, kernel, *numbers)
    call, differentiable = operators.forward, torch.is_grad_enabled() and _requires_grad(inputs)
    if transformed():
        if not compiling():
            # Under a transform a tensor does not know whether somebody further out differentiates with respect to it.
            call, differentiable = TransformedAttention.apply, True
        elif differentiable:
            raise UnsupportedError(
                "attention: torch.compile does not see through torch.func.grad of it; "
                "compile without fullgraph=True, which leaves this to eager mode, or differentiate with torch.autograd"
            )
    numbers = (left, right, rules.offset, rules.softcap, rules.dropout_p)
    output, lse, entropy, rest, *_ = call(*inputs, seed, kernel, *numbers, statistics, differentiable)
    return output, lse, entropy, None if nothing(rest) else rest


def _requires_grad(inputs: Inputs) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in inputs)
