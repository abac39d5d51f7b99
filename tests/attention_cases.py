"""One table of attention problems, a plain definition to judge by, and the error budget.

The plain definition is eager torch in one precision with autograd's gradients; it shares no line with the package. In float64 it
is the oracle, in float32 the peer whose error sets the budget.
"""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from attemper.kernels.triton_problem import interpreted

# Triton's interpreter is slow, and is asked for before Triton is imported: tests/kernels/test_triton.py runs a part of the tests
# in a process of their own, in which there is nothing else.
INTERPRETED = interpreted()
IMPLEMENTATIONS = ("triton",) if INTERPRETED else ("reference", "blocked", "cpu")
every_implementation = pytest.mark.parametrize("impl", IMPLEMENTATIONS)

STATISTICS = ("count", "max", "min", "argmax", "mean", "var", "lse", "entropy", "p2", "p3", "product_max", "product_min")


@dataclass(frozen=True)
class Case:
    """A problem by its shape and options; tensors follow from the seed. Dimensions are distinct primes, ragged to every tile."""

    name: str
    batch: int = 2
    heads: int = 3
    kv_heads: int = 3
    queries: int = 37
    keys: int = 41
    width: int = 19
    value_width: int = 11
    factor: float = 1.0
    mask: str | None = None  # "bool", "float", "keys" (one row for all), "heads" (differs by head), "column" (one for all keys)
    scale: str | float | None = None  # "scalar", "head", "query" for tensors
    softcap: float | None = None
    sinks: bool = False
    is_causal: bool = False
    window: tuple[int | None, int | None] | None = None
    offset: int = 0
    offset_of_logits: float = 0.0  # a common offset that the softmax ignores

    def seeds(self) -> range:
        """Draws to judge rounding by: more of them where a result has only a few numbers."""
        few = self.sinks or isinstance(self.scale, str) or self.queries == 1 or self.keys <= 2
        return range(5, 15 if few else 8)


CASES = (
    Case("plain"),
    Case("one query", queries=1, keys=1031),
    Case(
        "one query, grouped, window", heads=10, kv_heads=2, queries=1, keys=1201, is_causal=True, window=(389, None), offset=1187
    ),
    Case("few queries, masked by head", heads=6, kv_heads=3, queries=3, keys=523, mask="heads", scale="head"),
    Case("few queries, everything", 2, 6, 2, 2, 541, 13, 7, 2.0, "float", "query", 3.0, True, True, (300, 4), 520),
    Case("two keys", keys=2),
    Case("one key", keys=1),
    Case("no keys", keys=0),
    Case("no keys, sinks", keys=0, sinks=True),
    Case("no queries", queries=0),
    Case("no heads", heads=0, kv_heads=0),
    Case("no batch", batch=0),
    Case("width one", width=1, value_width=1),
    Case("width nought", width=0, mask="float", scale=0.7),
    Case("tile and one more", queries=513, keys=513, batch=1, heads=1, kv_heads=1),
    Case("tile less one", queries=17, keys=1023),
    Case("grouped", heads=6, kv_heads=2),
    Case("grouped, masked", heads=6, kv_heads=3, mask="heads", keys=523),
    Case("causal", is_causal=True),
    Case("causal, aligned right", is_causal=True, queries=5, keys=617, offset=612),
    Case("causal, rows without keys", is_causal=True, offset=-7),
    Case("window", window=(3, 5)),
    Case("window, one side", window=(None, 2), offset=3),
    Case("window, causal, far away", window=(11, 200), is_causal=True, queries=29, keys=1201, offset=700),
    Case("bool mask", mask="bool"),
    Case("column mask", mask="column", keys=271),
    Case("float mask", mask="float"),
    Case("key mask", mask="keys", keys=601),
    Case("float mask, causal, softcap", mask="float", is_causal=True, softcap=1.5),
    Case("scale: number", scale=0.7),
    Case("scale: nought", scale=0.0),
    Case("scale: negative", scale=-0.3),
    Case("scale: scalar tensor", scale="scalar"),
    Case("scale: per head", scale="head", heads=6, kv_heads=2),
    Case("scale: per query, softcap", scale="query", softcap=0.9),
    Case("sinks", sinks=True),
    Case("sinks, empty rows", sinks=True, mask="bool"),
    Case("everything", 2, 6, 2, 29, 541, 13, 7, 2.0, "float", "query", 3.0, True, True, (300, 4), 520),
    Case("sharp", factor=3.0, scale=1.0),
    Case("common offset", offset_of_logits=300.0, queries=31, keys=601),
)


@dataclass
class Problem:
    """The tensors of a case, leaves that require gradients, and the keyword arguments of the call."""

    query: Tensor
    key: Tensor
    value: Tensor
    arguments: dict[str, Any]

    def leaves(self) -> dict[str, Tensor]:
        """Everything that gets a gradient, by name."""
        found = {"query": self.query, "key": self.key, "value": self.value, **self.arguments}
        return {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor) and tensor.requires_grad}

    def reordered(self, order: Tensor) -> "Problem":
        """The same problem with the width of q and k in another order: other roundings, no other difference."""
        query, key = (tensor.detach()[..., order].requires_grad_() for tensor in (self.query, self.key))
        return Problem(query, key, self.value, self.arguments)

    def to(self, dtype: torch.dtype) -> "Problem":
        """The same numbers in another precision: scale and sinks never below float32."""

        def cast(name: str, thing: Any) -> Any:
            if not isinstance(thing, Tensor) or thing.dtype == torch.bool:
                return thing
            low = dtype in (torch.float16, torch.bfloat16) and name in ("scale", "sinks")
            return thing.detach().to(torch.float32 if low else dtype).requires_grad_(thing.requires_grad)

        query, key, value = (cast(name, getattr(self, name)) for name in ("query", "key", "value"))
        return Problem(query, key, value, {name: cast(name, thing) for name, thing in self.arguments.items()})


def build(case: Case, dtype: torch.dtype, seed: int = 5) -> Problem:
    """The case in a precision; every precision starts from the same numbers, rounded to it."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query = normal(case.batch, case.heads, case.queries, case.width) * case.factor
    key = normal(case.batch, case.kv_heads, case.keys, case.width) * case.factor
    value = normal(case.batch, case.kv_heads, case.keys, case.value_width)
    if case.offset_of_logits:
        query[..., 0] = math.sqrt(case.offset_of_logits * math.sqrt(case.width))
        key[..., 0] = query[:1, :1, :1, 0] if case.queries else 0.0
    arguments: dict[str, Any] = {
        "attn_mask": _mask(case, generator),
        "scale": _scale(case, generator),
        "softcap": case.softcap,
        "sinks": normal(case.heads).requires_grad_() if case.sinks else None,
        "is_causal": case.is_causal,
        "window": case.window,
        "offset": case.offset,
        "enable_gqa": case.heads != case.kv_heads,
    }
    return Problem(query.requires_grad_(), key.requires_grad_(), value.requires_grad_(), arguments).to(dtype)


def _mask(case: Case, generator: torch.Generator) -> Tensor | None:
    shapes = {
        "bool": (case.batch, 1, case.queries, case.keys),
        "float": (1, case.heads, case.queries, case.keys),
        "keys": (case.batch, 1, 1, case.keys),
        "heads": (case.heads, case.queries, case.keys),
        "column": (case.batch, case.heads, case.queries, 1),
    }
    if case.mask is None:
        return None
    uniform = torch.rand(shapes[case.mask], generator=generator, dtype=torch.float64)
    if case.mask != "float":
        visible = uniform > 0.3
        if visible.shape[-2] > 3:
            visible[..., 3, :] = False
        return visible
    mask = 6.0 * uniform - 3.0
    mask[..., 0] = -math.inf
    mask[..., 1, :] = -math.inf
    return mask.requires_grad_()


def _scale(case: Case, generator: torch.Generator) -> Any:
    shapes = {"scalar": (), "head": (case.heads,), "query": (case.batch, case.heads, case.queries)}
    if not isinstance(case.scale, str):
        return case.scale
    return (0.1 + torch.rand(shapes[case.scale], generator=generator, dtype=torch.float64)).requires_grad_()


def plain(problem: Problem) -> tuple[Tensor, dict[str, Tensor]]:
    """(output, statistics by name) by eager torch operations in the precision of the problem, materialised."""
    arguments = problem.arguments
    heads, queries, width = problem.query.shape[-3:]
    keys = problem.key.shape[-2]
    groups = heads // problem.key.shape[-3] if problem.key.shape[-3] else 1
    key, value = (tensor.repeat_interleave(groups, -3) for tensor in (problem.key, problem.value))
    scale, mask = arguments["scale"], arguments["attn_mask"]
    if scale is None:
        scale = width**-0.5
    elif isinstance(scale, Tensor) and scale.ndim:
        scale = scale.reshape(-1, 1, 1) if scale.ndim == 1 else scale.unsqueeze(-1)
    products = problem.query @ key.mT
    logits = products * scale
    if arguments["softcap"] is not None:
        logits = arguments["softcap"] * torch.tanh(logits / arguments["softcap"])

    distance = torch.arange(keys) - torch.arange(queries).unsqueeze(-1) - arguments["offset"]
    visible = torch.ones(queries, keys, dtype=torch.bool)
    if arguments["is_causal"]:
        visible = visible & (distance <= 0)
    left, right = arguments["window"] or (None, None)
    visible = visible if left is None else visible & (distance >= -left)
    visible = visible if right is None else visible & (distance <= right)
    if mask is not None and mask.dtype == torch.bool:
        visible = visible & mask
    elif mask is not None:
        visible = visible & (mask > -math.inf)
        logits = logits + torch.where(mask > -math.inf, mask, 0.0)
    visible = visible.expand(logits.shape)
    return _finish(logits, products, visible, value, arguments["sinks"])


def _finish(
    logits: Tensor, products: Tensor, visible: Tensor, value: Tensor, sinks: Tensor | None
) -> tuple[Tensor, dict[str, Tensor]]:
    count = visible.sum(-1)
    if not logits.shape[-1]:  # amax has no answer for no keys; one invisible key is the same thing
        logits, products, visible = (torch.nn.functional.pad(x, (0, 1)) for x in (logits, products, visible))
        value = torch.nn.functional.pad(value, (0, 0, 0, 1))
    hidden = logits.masked_fill(~visible, -math.inf)
    extended = hidden if sinks is None else torch.cat([hidden, sinks.reshape(-1, 1, 1).expand(*hidden.shape[:-1], 1)], -1)
    top = extended.detach().amax(-1, keepdim=True)
    shifted = extended - top.masked_fill(top == -math.inf, 0.0)
    exponentials = torch.exp(shifted)
    total = exponentials.sum(-1, keepdim=True)
    total = total.masked_fill(total == 0.0, 1.0)
    weights = exponentials / total
    lse = (top + torch.log(total)).squeeze(-1)
    log_weights = (shifted - torch.log(total)).masked_fill(weights == 0.0, 0.0)
    divisor = count.clamp(min=1)
    mean = logits.masked_fill(~visible, 0.0).sum(-1) / divisor
    deviation = (logits - mean.unsqueeze(-1)).masked_fill(~visible, 0.0)
    statistics = {
        "count": count,
        "max": hidden.amax(-1),
        "min": logits.masked_fill(~visible, math.inf).amin(-1),
        "argmax": hidden.argmax(-1).masked_fill(count == 0, -1),
        "logits": hidden,
        "mean": mean,
        "var": deviation.square().sum(-1) / divisor,
        "lse": lse,
        "entropy": -(weights * log_weights).sum(-1),
        "p2": weights.square().sum(-1),
        "p3": weights.pow(3).sum(-1),
        "product_max": products.masked_fill(~visible, -math.inf).amax(-1),
        "product_min": products.masked_fill(~visible, math.inf).amin(-1),
    }
    return weights[..., : logits.shape[-1]] @ value, statistics


def flowing(output: Tensor, lse: Tensor, entropy: Tensor) -> list[Tensor]:
    """The gradients of a loss with respect to all that is differentiable, uneven over every dimension.

    They hold eighths below 4 only, so that every precision starts from the same numbers.
    """

    def uneven(tensor: Tensor, step: int) -> Tensor:
        steps = torch.arange(tensor.numel(), dtype=torch.float64) * step % 61 - 30
        return (steps / 8).reshape(tensor.shape).to(tensor.dtype)

    return [uneven(output, 7), uneven(lse, 11), uneven(entropy, 13)]


def gradients_of(problem: Problem, output: Tensor, lse: Tensor, entropy: Tensor) -> dict[str, Tensor]:
    """The gradients of all leaves, by name, when those of `flowing` flow in."""
    leaves, upstream = problem.leaves(), flowing(output, lse, entropy)
    found = torch.autograd.grad(
        [output, lse, entropy], list(leaves.values()), upstream, allow_unused=True, materialize_grads=True
    )
    return dict(zip(leaves, found, strict=True))


class Budget:
    """Errors against float64 over several draws of a case, ours and the peer's.

    The bound: the largest error is at most twice the peer's largest plus one rounding of the largest value, in the precision of
    the result. Rounding is luck in a single draw of a few numbers; over several draws, each evaluated by the peer in several
    orders of summation, it is a property of the method.
    Source: the form of the bound is that of FlashAttention's tests.
    """

    def __init__(self) -> None:
        self.errors: dict[str, float] = {}
        self.allowed: dict[str, float] = {}
        self.roundings: dict[str, float] = {}

    def add(self, what: str, actual: Tensor, oracle: Tensor, *peers: Tensor) -> None:
        """Take in one result and what peers give; its shape, its infinities and its finiteness are checked at once."""
        assert actual.shape == oracle.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(oracle.shape)}"
        eps = torch.finfo(actual.dtype).eps
        actual, oracle = actual.detach().double(), oracle.detach().double()
        infinite = torch.isinf(oracle)
        assert torch.equal(actual[infinite], oracle[infinite]), f"{what}: infinities differ"
        theirs = [peer.detach().double()[~infinite] for peer in peers]
        actual, oracle = actual[~infinite], oracle[~infinite]
        if not oracle.numel():
            return
        assert torch.isfinite(actual).all(), f"{what}: {int((~torch.isfinite(actual)).sum())} values are not finite"
        self.errors[what] = max(self.errors.get(what, 0.0), (actual - oracle).abs().max().item())
        self.allowed[what] = max(self.allowed.get(what, 0.0), *(2.0 * (peer - oracle).abs().max().item() for peer in theirs))
        self.roundings[what] = max(self.roundings.get(what, 0.0), eps * oracle.abs().max().item())

    def join(self, other: "Budget") -> None:
        """Take in what another process found of other draws."""
        for own, theirs in ((self.errors, other.errors), (self.allowed, other.allowed), (self.roundings, other.roundings)):
            own |= {what: max(own.get(what, 0.0), number) for what, number in theirs.items()}

    def check(self) -> None:
        """Assert the bound for everything that was taken in."""
        over = {what: (error, self.allowed[what] + self.roundings[what]) for what, error in self.errors.items()}
        over = {what: pair for what, pair in over.items() if pair[0] > pair[1]}
        assert not over, "; ".join(
            f"{what}: error {error:.3e} above the budget {bound:.3e}" for what, (error, bound) in over.items()
        )


def tensors(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """A query, a key and a value of one shape, for tests that vary something else."""
    query, key, value = (torch.randn(*shape) for _ in range(3))
    return query, key, value
