"""Random problems, the compiled kernel against the definition in float64: `make fuzz COUNT=20000 SEED=0`.

Each problem is run twice, the second time on another number of threads: not a bit may differ. Counts are exact, NaN and
infinities stand where the definition has them, an argmax is the definition's unless the two logits are equal within rounding, and
numbers keep within their first-order error bound (first_order.py) and one rounding to the dtype of the result. What
does not is held against the definition in the kernel's own precision, with its sums in several orders: twice that error will do.
A failure is one line, with the number that brings it back: `python -m tests.kernels.fuzz --seed 0 --only 1234`.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attemper import attention
from attemper.kernels import cpu
from attemper.kernels.spec import invisible_below
from attemper.ops import arguments as door
from attemper.ops import row_stats
from tests.attention_cases import STATISTICS, Problem
from tests.kernels.first_order import Bounds
from tests.kernels.random_problems import Sample, sample

ORDERS = 6  # of summation, in which the yardstick is read where a bound is passed

Results = dict[str, Tensor]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the problems asked for; 1 where one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=20000, help="how many problems")
    parser.add_argument("--seed", type=int, default=0, help="which series of them")
    parser.add_argument("--first", type=int, default=0, help="the number of the first")
    parser.add_argument("--only", type=int, help="this number alone")
    options = parser.parse_args(arguments)
    numbers = range(options.first, options.first + options.count) if options.only is None else [options.only]
    if cpu._cpu is None:
        parser.error("the kernel is not built here")
    began, failures, tightest = time.monotonic(), 0, Tightness()
    for number in numbers:
        found = list(faults(sample(options.seed, number), tightest))
        failures += bool(found)
        if found:
            print(
                f"--seed {options.seed} --only {number}: {'; '.join(found)}\n    {sample(options.seed, number).describe()}",
                flush=True,
            )
    print(f"nearest to their bounds: {tightest}; {time.monotonic() - began:.0f} s")
    isa = cpu._cpu.instruction_set()
    print(f"{len(numbers)} configurations, {failures} failures, seed {options.seed}, instruction set {isa}")
    return int(failures > 0)


@dataclass
class Tightness:
    """The largest share of its bound that any result has used beside the last rounding, by name."""

    shares: dict[str, float] = field(default_factory=dict)

    def note(self, name: str, share: float) -> None:
        self.shares[name] = max(self.shares.get(name, 0.0), share)

    def __str__(self) -> str:
        ordered = sorted(self.shares.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {share:.2f}" for name, share in ordered)


def faults(drawn: Sample, tightness: Tightness | None = None) -> Iterator[str]:
    """What is wrong with the kernel on this problem, in words."""
    tightness = Tightness() if tightness is None else tightness
    try:
        ours = results(drawn.problem, drawn, "cpu")
        again = results(drawn.problem, drawn, "cpu", drawn.threads)
        truth = Truth(drawn)
        yield from (f"{name} differs on {drawn.threads} threads" for name in ours if not _same_bits(ours[name], again[name]))
        yield from truth.faults_of(ours, tightness)
    except Exception as error:  # noqa: BLE001  one more fault, and the next problem's turn
        yield f"{type(error).__name__}: {error}"


def results(problem: Problem, drawn: Sample, impl: str, threads: int = 1) -> Results:
    """Everything that the call gives, and the gradients, by name."""
    torch.set_num_threads(threads)
    torch.manual_seed(drawn.dropout_seed)  # of which the seed of dropout is drawn
    options = dict(problem.arguments)
    if drawn.kind == "rows":
        options = {name: option for name, option in options.items() if name not in ("dropout_p", "enable_gqa")}
        rows = row_stats(problem.query, problem.key, **options, impl=impl)
        return {name: getattr(rows, name) for name in STATISTICS}
    if drawn.kind == "output":
        output = attention(problem.query, problem.key, problem.value, **options, impl=impl)
        found, differentiable = {"output": output}, [output]
    else:
        output, rows = attention(problem.query, problem.key, problem.value, **options, return_stats=True, impl=impl)
        found = {"output": output, **{name: getattr(rows, name) for name in STATISTICS}}
        differentiable = [output, rows.lse, rows.entropy]
    leaves = problem.leaves()
    if leaves:
        flow = upstream(drawn, found)
        gradients = torch.autograd.grad(
            differentiable, list(leaves.values()), [flow[name] for name in flow], allow_unused=True, materialize_grads=True
        )
        found |= {f"gradient of {name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    torch.set_num_threads(1)
    return {name: tensor.detach() for name, tensor in found.items()}


def upstream(drawn: Sample, found: Results) -> Results:
    """The gradients that flow in, the same numbers for every precision: few enough digits for all of them."""
    generator, flow = torch.Generator().manual_seed(drawn.dropout_seed), {}
    for name in ("output", "lse", "entropy"):
        if name in found:
            of = found[name]
            numbers = (torch.randint(-30, 31, of.shape, generator=generator) / 8).to(of.dtype)
            if drawn.layout == "one number" and of.numel():
                numbers = numbers.flatten()[0].expand(of.shape)
            flow[name] = numbers.mT.contiguous().mT if drawn.layout == "transposed" else numbers
    return flow


class Truth:
    """The definition's results for a problem, and how far a kernel's may be from them."""

    def __init__(self, drawn: Sample) -> None:
        self.drawn, problem = drawn, drawn.problem
        self.compute = torch.float64 if problem.query.dtype == torch.float64 else torch.float32
        self.eps = torch.finfo(self.compute).eps
        led = (problem.query, problem.key) if drawn.kind == "rows" else (problem.query, problem.key, problem.value)
        self.lead = torch.broadcast_shapes(*(tensor.shape[:-3] for tensor in led))
        exact = self._in(torch.float64)
        self.results = results(exact, drawn, "reference")
        self.bounds, self.allowed = self._bounds(exact)

    def faults_of(self, ours: Results, tightness: Tightness) -> Iterator[str]:
        """What is wrong with a kernel's results, in words; how near the others are to their bounds is noted."""
        if set(ours) != set(self.results):
            yield f"results {sorted(ours)}, expected {sorted(self.results)}"
            return
        for name, actual in ours.items():
            expected = self._summed(name, self.results[name])
            if actual.shape != expected.shape:
                yield f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
            elif name == "count":
                yield from ["count differs"] if not torch.equal(actual, expected) else []
            elif name == "argmax":
                yield from self._faults_of_argmax(actual, expected)
            else:
                yield from self._faults_of_pattern(name, actual, expected, ours.get("max"))
                yield from self._faults_of_size(name, actual, expected, tightness)

    def _in(self, dtype: torch.dtype) -> Problem:
        """The same numbers in another precision, scale and sinks rounded as the kernel has them.

        Leading dimensions are spread out, so that each gradient is known before it is summed over them: the sum is of numbers
        that are rounded to the dtype of the input.
        """
        problem, options = self.drawn.problem, dict(self.drawn.problem.arguments)

        def leaf(tensor: Tensor, like: Tensor) -> Tensor:
            return tensor.detach().to(dtype).requires_grad_(like.requires_grad)

        def spread(tensor: Tensor) -> Tensor:
            return leaf(tensor.detach().expand(*self.lead, *tensor.shape[-3:]), tensor)

        for name in ("scale", "sinks"):
            if isinstance(options[name], Tensor):
                options[name] = leaf(options[name].detach().to(self.compute), options[name])
        if not isinstance(options["scale"], Tensor):
            width = problem.query.shape[-1]
            scale = (width**-0.5 if width else 1.0) if options["scale"] is None else options["scale"]
            options["scale"] = torch.tensor(scale, dtype=self.compute).item()
        mask = options["attn_mask"]
        if mask is not None and mask.is_floating_point():
            hidden = mask.detach() <= invisible_below(mask.dtype, self.compute)
            plain = mask.detach().to(dtype).masked_fill(hidden, -torch.inf)
            if plain.shape[:-3].numel() > 1:
                plain = plain.expand(*self.lead, *plain.shape[-3:])
            options["attn_mask"] = leaf(plain, mask)
        value = problem.value if self.drawn.kind == "rows" else spread(problem.value)
        return Problem(spread(problem.query), spread(problem.key), value, options)

    @torch.no_grad()
    def _bounds(self, exact: Problem) -> tuple[Bounds, Results]:
        options = {name: option.detach() if isinstance(option, Tensor) else option for name, option in exact.arguments.items()}
        value = None if self.drawn.kind == "rows" else exact.value.detach()
        checked = door.check(exact.query.detach(), exact.key.detach(), value, **(options | {"enable_gqa": True}))
        rounds_weights = cpu.rounds_weights() and self.drawn.problem.query.dtype == torch.bfloat16
        bounds = Bounds(checked, self.eps, torch.finfo(torch.bfloat16).eps / 2 if rounds_weights else 0.0)
        allowed = {
            name: bound.reshape(self.results[name].shape) for name, bound in bounds.forward().items() if name in self.results
        }
        leaves = self.drawn.problem.leaves()
        if leaves:
            flow = upstream(self.drawn, self.results)
            found = bounds.backward(
                *(
                    None if name not in flow else flow[name].reshape(bounds.shape[:3] + flow[name].shape[len(self.lead) + 2 :])
                    for name in ("output", "lse", "entropy")
                )
            )
            for name in leaves:
                bound = found[name] if name == "sinks" else found[name].reshape(*self.lead, *found[name].shape[1:])
                allowed[f"gradient of {name}"] = self._summed(f"gradient of {name}", bound)
        return bounds, allowed

    def _summed(self, name: str, tensor: Tensor) -> Tensor:
        """A gradient over the dimensions along which its input is repeated."""
        leaf = self.drawn.problem.leaves().get(name.removeprefix("gradient of "))
        if leaf is None or tensor.shape == leaf.shape:
            return tensor
        return (
            tensor.sum_to_size(*leaf.shape, 1).squeeze(-1)
            if name.endswith("scale") and leaf.ndim == 1
            else tensor.sum_to_size(leaf.shape)
        )

    def _faults_of_argmax(self, actual: Tensor, expected: Tensor) -> Iterator[str]:
        bounds = self.bounds
        if not torch.equal(actual == -1, expected == -1) or (actual >= bounds.shape[3]).any():
            yield "argmax of a row without keys, or of none"
            return
        found = bounds.shown.gather(-1, actual.reshape(bounds.shape[:3]).clamp(min=0).unsqueeze(-1)).squeeze(-1)
        largest = bounds.shown[..., :-1].amax(-1) if bounds.shape[3] else found
        short = (largest - found > 2.0 * self.eps * bounds.largest_z) & ~bounds.uncertain
        different = (actual != expected).reshape(short.shape)
        if (short & different).any():
            yield f"argmax of {int((short & different).sum())} rows is not the largest logit"

    def _faults_of_pattern(self, name: str, actual: Tensor, expected: Tensor, largest: Tensor | None) -> Iterator[str]:
        """NaN and infinities, as far as they are defined.

        Of a gradient, and of an output that saw an infinite value, only that it is not finite: 0 · ∞ is NaN where a weight is 0,
        and how soon it is depends on the precision. Extremes of a row that sees NaN and ∞ are either. And the definition writes
        NaN to every weight of a row that sees one, so that it reaches the gradients of keys that are hidden from that row.
        """
        wild, expected = self.bounds.wild, expected.to(actual.dtype)
        if name.startswith("gradient"):
            reached = ~torch.isfinite(self.allowed[name])
            known = not wild.any() and (
                self.bounds.visible.all() or not (self.bounds.broken & torch.isfinite(self.bounds.lse)).any()
            )
            if known and torch.isfinite(actual)[~torch.isfinite(expected) & reached].any():
                yield f"{name} is finite where it should not be"
            if not torch.isfinite(actual)[~reached & (expected.abs() < torch.finfo(actual.dtype).max)].all():
                yield f"{name} is not finite where nothing broken is seen"
            return
        judged = ~wild.reshape(*self.lead, *wild.shape[1:])
        if name in ("max", "min", "product_max", "product_min"):
            judged = judged & ~(torch.isnan(self.results["max"]) & (largest == torch.inf))
        actual, expected = actual[judged], expected[judged]
        infinite = torch.isinf(expected) & (torch.isinf(actual) | (name != "output"))
        if name == "output" and not torch.equal(torch.isfinite(actual), torch.isfinite(expected)):
            finite = int(torch.isfinite(actual).sum())
            yield f"output: finite at {finite} places, expected at {int(torch.isfinite(expected).sum())}"
        elif name != "output" and not torch.equal(torch.isnan(actual), torch.isnan(expected)):
            yield f"{name}: NaN at {int(torch.isnan(actual).sum())} places, expected at {int(torch.isnan(expected).sum())}"
        elif not torch.equal(actual[infinite], expected[infinite]):
            yield f"{name}: infinities differ"

    def _faults_of_size(self, name: str, actual: Tensor, expected: Tensor, tightness: Tightness) -> Iterator[str]:
        kind, bound = torch.finfo(actual.dtype), self.allowed[name]
        of = self._summed(name, self.results[name].abs())
        repeated = self.results[name].shape != actual.shape  # and so summed once more
        terms = self._summed(name, torch.ones_like(self.results[name]))  # each of which may be a subnormal number
        rounding = 0.51 * kind.eps * (of + expected.abs() if repeated else of) + kind.smallest_normal * kind.eps * terms
        allowed = self.eps * bound + rounding
        judged = torch.isfinite(bound) & (expected.abs() < 0.99 * kind.max)  # not where the definition has a NaN
        error = (actual.double() - expected).abs()
        bad = judged & ~(error <= allowed)
        if judged.any():
            share = ((error - rounding) / (self.eps * bound)).nan_to_num(0.0)[judged].max().item()
            tightness.note(name, min(share, 99.0))
        if bad.any() and not (error[bad] <= 2.0 * self._yardstick(name) + rounding[bad]).all():
            worst = (error / allowed).masked_fill(~bad, 0.0).argmax()
            numbers = f"{actual.flatten()[worst]:.9g} for {expected.flatten()[worst]:.9g}, allowed {allowed.flatten()[worst]:.3g}"
            yield f"{name}: {int(bad.sum())} of {bad.numel()} numbers off, the worst {numbers}"

    def _yardstick(self, name: str) -> float:
        """The largest error of the definition in the kernel's own precision."""
        worst, width = 0.0, self.drawn.problem.query.shape[-1]
        for number in range(ORDERS):
            order = torch.randperm(width, generator=torch.Generator().manual_seed(number))
            found = results(self._in(self.compute).reordered(order), self.drawn, "reference")[name].double()
            found = found[..., order.argsort()] if name in ("gradient of query", "gradient of key") else found
            error = (found - self.results[name]).abs()
            worst = max(worst, error[torch.isfinite(error)].max().item() if torch.isfinite(error).any() else 0.0)
        return worst


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.contiguous().view(whole), other.contiguous().view(whole))


if __name__ == "__main__":
    import tests.conftest  # noqa: F401  memory that is allocated and not written then holds NaN

    sys.exit(main())
