"""What becomes of a product on its way into a softmax: one entry for each step, read from the call that made it.

A step is understood where the logits stay "factor · product + bias": factors, biases, masks, one cap, casts, and anything that
only moves numbers. Tensors are referred to, not copied. Nothing is computed here; `formula` does that, when attention is told.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attemper.capture.axes import Axes, Group
from attemper.capture.products import Product

Operand = Tensor | float


class Step(NamedTuple):
    """One step: "multiply", "divide", "add", "fill" (where `where` is True, or False if `unless`), "bound" or "cap".

    Attributes:
        operand: the factor, the addend or the number filled in; groups: the axes of the result's dimensions at the time.
    """

    kind: str
    groups: tuple[Group, ...]
    operand: Operand = 1.0
    factor: float = 1.0
    where: Tensor | None = None
    unless: bool = False


@dataclass(frozen=True)
class Chain:
    """A tensor that was made of a product in steps that are understood.

    Attributes:
        product: where it began; axes: of the tensor as it is now; steps: so far.
        multiplied: dtype in which the operands were multiplied; coarsest: of all dtypes that it passed through.
        module: name of the module that multiplied.
    """

    product: Product
    axes: Axes
    steps: tuple[Step, ...]
    multiplied: torch.dtype
    coarsest: torch.dtype
    module: str

    @classmethod
    def begin(cls, product: Product, output: Tensor, module: str) -> "Chain":
        """What the call that multiplied gave: the product, times a factor, plus what baddbmm adds."""
        groups = product.axes.groups
        steps = [] if product.factor == 1 else [Step("multiply", groups, product.factor)]
        if product.added is not None:
            steps.append(Step("add", groups, product.added, product.added_factor))
        return cls(product, product.axes, tuple(steps), output.dtype, output.dtype, module)

    def step(self, output: Tensor, axes: Axes, *steps: Step) -> "Chain":
        """One call further."""
        coarsest = max(self.coarsest, output.dtype, key=lambda each: torch.finfo(each).eps)
        return replace(self, axes=axes, steps=(*self.steps, *steps), coarsest=coarsest)


class Lost(NamedTuple):
    """A tensor that was made of a product by a function that is not followed."""

    by: str


class Call(NamedTuple):
    """One call of a torch function: its arguments, its output, and which argument is followed."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor
    place: int

    def given(self, place: int, name: str, default: Any = None) -> Any:
        """An argument, by position or by name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    @property
    def other(self) -> Any:
        """The second operand of a function of two."""
        return self.args[0] if self.place == 1 else self.given(1, "other")


def followed(chain: Chain, call: Call) -> "Chain | Lost":
    """The chain after a call, or that it was lost and by what."""
    axes = axes_after(chain.axes, call)
    if axes is None or not call.output.is_floating_point():
        return Lost(call.name)
    read = _STEPS.get(call.name)
    steps = () if read is None else read(call, axes.groups)
    if steps is None or (any(step.kind == "cap" for step in steps) and not _capped_alone(chain.steps)):
        return Lost(call.name)
    return chain.step(call.output, axes, *steps)


def axes_after(axes: Axes, call: Call) -> Axes | None:
    """The axes of the output of a call that moves or broadcasts numbers; None for any other function."""
    if call.name in _MOVES and not (call.name == "__getitem__" and _picks(call.args[1])):
        return axes.reshaped(call.output.shape)
    if call.name in _WIDENS:
        return axes.widened(call.output.shape)
    order = _order(call, len(axes.groups)) if call.name in _ORDERS else None
    return None if order is None else axes.permuted(order)


def is_understood(name: str) -> bool:
    """Whether a chain may go through functions of this name."""
    return name in _MOVES or name in _WIDENS or name in _ORDERS


def is_reference(name: str, place: int) -> bool:
    """Whether a function only looks at the shape, the dtype or the device of its argument at this place."""
    return name.endswith("_like") or name.startswith("new_") or (place > 0 and is_understood(name) and name not in _STEPS)


def is_operand(thing: Any) -> bool:
    """Whether it can be a factor or an addend."""
    return isinstance(thing, Tensor | int | float) and not isinstance(thing, bool)


_CASTS = ("float", "double", "half", "bfloat16", "to", "type", "type_as", "contiguous", "clone", "detach", "data", "nan_to_num")
_VIEWS = ("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze", "__getitem__")
_MOVES = {*_CASTS, *_VIEWS}
_ORDERS = {"transpose", "swapaxes", "swapdims", "permute", "mT", "mH", "T", "t", "movedim", "moveaxis"}


def _picks(index: Any) -> bool:
    """Whether an index may choose numbers or change their order; what is as large as before was not cut by slices."""
    parts = index if isinstance(index, tuple) else (index,)
    return not all(part is None or part is Ellipsis or isinstance(part, slice | int) for part in parts)


def _order(call: Call, dimensions: int) -> list[int] | None:
    """The dimensions of the input in the order of the output."""
    order = list(range(dimensions))
    if call.name in ("mT", "mH"):
        return [*order[:-2], order[-1], order[-2]]
    if call.name in ("T", "t"):
        return order[::-1]
    if call.name == "permute":
        dims = call.given(1, "dims")
        return [each % dimensions for each in (dims if isinstance(dims, Sequence) else call.args[1:])]
    names = ("source", "destination") if call.name.startswith("move") else ("dim0", "dim1")
    one, two = (call.given(place, name) for place, name in enumerate(names, 1))
    if call.name.startswith("swap"):
        one, two = (one if one is not None else call.kwargs.get("axis0")), (two if two is not None else call.kwargs.get("axis1"))
    if not isinstance(one, int) or not isinstance(two, int):
        return None
    if call.name.startswith("move"):
        order.insert(two % dimensions, order.pop(one % dimensions))
    else:
        order[one], order[two] = order[two], order[one]
    return order


def _multiplied(call: Call, groups: tuple[Group, ...]) -> tuple[Step, ...] | None:
    return (Step("multiply", groups, call.other),) if is_operand(call.other) else None


def _divided(call: Call, groups: tuple[Group, ...]) -> tuple[Step, ...] | None:
    if call.place or not is_operand(call.other) or call.kwargs.get("rounding_mode") is not None:
        return None
    return (Step("divide", groups, call.other),)


def _added(call: Call, groups: tuple[Group, ...]) -> tuple[Step, ...] | None:
    alpha = call.kwargs.get("alpha", 1)
    if not is_operand(call.other) or (call.place and alpha != 1):
        return None
    return (Step("add", groups, call.other, alpha),)


def _subtracted(call: Call, groups: tuple[Group, ...]) -> tuple[Step, ...] | None:
    alpha = call.kwargs.get("alpha", 1)
    if not is_operand(call.other) or (alpha != 1 and (call.place or "rsub" in call.name)):
        return None
    if call.place or "rsub" in call.name:
        return Step("multiply", groups, -1.0), Step("add", groups, call.other)
    return (Step("add", groups, call.other, -alpha),)


def _filled(call: Call, groups: tuple[Group, ...]) -> tuple[Step, ...] | None:
    mask, value = call.given(1, "mask"), call.given(2, "value")
    if call.place:
        return None
    return (Step("fill", groups, value, where=mask),) if isinstance(mask, Tensor) and is_operand(value) else None


def _chosen(call: Call, groups: tuple[Group, ...]) -> tuple[Step, ...] | None:
    """torch.where(condition, input, other) and input.where(condition, other)."""
    if len(call.args) != 3:
        return None
    condition = next((each for each in call.args[:2] if isinstance(each, Tensor) and each.dtype == torch.bool), None)
    others = [(place, each) for place, each in enumerate(call.args) if each is not condition]
    if condition is None or len(others) != 2 or not all(is_operand(each) for _, each in others):
        return None
    first = others[0][0] == call.place
    return (Step("fill", groups, others[first][1], where=condition, unless=first),)


def _bounded(call: Call, groups: tuple[Group, ...]) -> tuple[Step, ...] | None:
    """Bounds are there against overflow: within them nothing changes. Where something did, the comparison at the end shows it."""
    low = call.other if call.name in ("max", "maximum") else call.given(1, "min") if call.name != "clamp_max" else None
    if call.name in ("min", "minimum"):
        low = None
    return (Step("bound", groups, low),) if isinstance(low, Tensor) else ()


def _capped(call: Call, groups: tuple[Group, ...]) -> tuple[Step, ...] | None:
    return (Step("cap", groups),)


def _dropped(call: Call, groups: tuple[Group, ...]) -> tuple[Step, ...] | None:
    return () if dropout_of(call) == 0 else None


def dropout_of(call: Call) -> float:
    """The probability that a call of dropout applies."""
    function = call.name == "dropout"
    probability, training = call.given(1, "p", 0.5), call.given(2, "training", call.kwargs.get("train", True))
    return float(probability) if function and training else 0.0


_STEPS: dict[str, Callable[[Call, tuple[Group, ...]], tuple[Step, ...] | None]] = {
    **dict.fromkeys(("mul", "multiply", "__rmul__"), _multiplied),
    **dict.fromkeys(("div", "divide", "true_divide", "__truediv__"), _divided),
    **dict.fromkeys(("add", "__radd__"), _added),
    **dict.fromkeys(("sub", "subtract", "rsub", "__rsub__"), _subtracted),
    "neg": lambda _, groups: (Step("multiply", groups, -1.0),),
    "masked_fill": _filled,
    "where": _chosen,
    **dict.fromkeys(("max", "maximum", "min", "minimum", "clamp", "clip", "clamp_min", "clamp_max"), _bounded),
    "tanh": _capped,
    "dropout": _dropped,
}
_WIDENS = {*_STEPS, "expand", "expand_as"}


def _capped_alone(steps: tuple[Step, ...]) -> bool:
    return all(step.kind in ("multiply", "divide") for step in steps)


class Formula(NamedTuple):
    """logits = cap(scale · product) + bias, with one dimension for each axis; bias None where nothing is added."""

    scale: Operand
    softcap: Operand | None
    bias: Tensor | None


def formula(chain: Chain, axes: Axes, order: Sequence[int], keys: int) -> Formula:
    """The steps of a chain as one formula.

    A factor that differs by key is held to be a mask of zeros and ones, as in w·m + (1 − m)·(−10⁴): it acts on the bias alone.
    The comparison at the end shows where it was something else.

    Args:
        axes: the chain's own or later ones; order: of all axes; keys: how many of them, at the end, are the keys'.
    """
    scale: Operand = 1.0
    before: Operand | None = None
    bias: Tensor | None = None
    device = chain.product.left.tensor.device

    def laid(operand: Any, groups: tuple[Group, ...]) -> Any:
        if not isinstance(operand, Tensor):
            return operand
        operand = operand.detach()
        return axes.laid_out(operand, groups, order).to(device)

    for kind, groups, operand, factor, where, unless in chain.steps:
        own = laid(operand, groups)
        if kind == "multiply":
            by_key = isinstance(own, Tensor) and max(own.shape[len(order) - keys :], default=1) > 1
            scale, bias = scale if by_key else scale * own, None if bias is None else bias * own
        elif kind == "divide":
            scale, bias = scale / own, None if bias is None else bias / own
        elif kind == "add":
            own = own * factor if factor != 1 else own
            addend = own if isinstance(own, Tensor) else torch.tensor(float(own), device=device).reshape([1] * len(order))
            bias = addend if bias is None else bias + addend
        elif kind == "fill":
            mask = laid(where, groups).bool()
            base = torch.zeros((), dtype=chain.coarsest, device=device) if bias is None else bias
            bias = torch.where(mask, base, own) if unless else torch.where(mask, own, base)
        elif kind == "bound" and bias is not None:
            bias = torch.maximum(bias, own.to(bias.dtype))
        elif kind == "cap":
            before, scale = scale, 1.0
    return Formula(scale if before is None else before * scale, None if before is None else scale, bias)
