"""Products of two tensors, read from the arguments of matmul, bmm, baddbmm and einsum: which axis of which operand is which."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attemper.capture.axes import Axes, Group

PRODUCTS = ("matmul", "__rmatmul__", "bmm", "baddbmm", "einsum")  # functions that make them


@dataclass(frozen=True)
class Operand:
    """One factor of a product: the tensor, the axes of its dimensions, and those that only it has."""

    tensor: Tensor
    groups: tuple[Group, ...]
    own: Group


@dataclass(frozen=True)
class Product:
    """A product: out = Σ left · right over the axes `summed`.

    Attributes:
        left, right: the factors. axes: of the result. summed: the axes that both have and the result lacks.
        factor: what the product is multiplied by; added, added_factor: what is added to it (baddbmm), None if nothing.
    """

    left: Operand
    right: Operand
    axes: Axes
    summed: Group
    factor: float = 1.0
    added: Tensor | None = None
    added_factor: float = 1.0


@dataclass(frozen=True)
class Factors:
    """What a call multiplies, with a label for each dimension: the same label in two places is the same index."""

    left: Tensor
    right: Tensor
    labels: tuple[Sequence[str], Sequence[str], Sequence[str]]
    factor: float = 1.0
    added: Tensor | None = None
    added_factor: float = 1.0


def factors_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Factors | None:
    """What a call multiplies; None where it is no product of two tensors with rows and columns."""
    if name == "einsum":
        return _of_einsum(args)
    if name == "baddbmm":
        given = dict(zip(("input", "batch1", "batch2"), args, strict=False)) | kwargs
        if not all(isinstance(given.get(key), Tensor) for key in ("input", "batch1", "batch2")):
            return None
        left, right = given["batch1"], given["batch2"]
        beta = given.get("beta", 1)
        added = given["input"] if beta != 0 else None
        return Factors(left, right, _rows_and_columns(left, right), given.get("alpha", 1), added, beta)
    names = ("input", "mat2" if name == "bmm" else "other")
    given = dict(zip(names, args, strict=False)) | {("input" if key == "self" else key): each for key, each in kwargs.items()}
    left, right = given.get(names[0]), given.get(names[1])
    if name == "__rmatmul__":
        left, right = right, left
    if not isinstance(left, Tensor) or not isinstance(right, Tensor) or left.ndim < 2 or right.ndim < 2:
        return None
    return Factors(left, right, _rows_and_columns(left, right))


def product_of(factors: Factors) -> Product | None:
    """The product over numbered axes; None where the labels sum one operand by itself."""
    left, right, out = factors.labels
    sizes: dict[str, int] = {}
    for labels, tensor in ((left, factors.left), (right, factors.right)):
        if len(set(labels)) != len(labels):
            return None
        for label, length in zip(labels, tensor.shape, strict=True):
            sizes[label] = max(sizes.get(label, 1), length)
    numbers = {label: number for number, label in enumerate(label for label, length in sizes.items() if length > 1)}

    def runs(labels: Sequence[str]) -> tuple[Group, ...]:
        return tuple((numbers[label],) if label in numbers else () for label in labels)

    def only(here: Sequence[str], there: Sequence[str]) -> Group:
        return tuple(numbers[label] for label in here if label in numbers and label not in there)

    summed = tuple(numbers[label] for label in left if label in numbers and label in right and label not in out)
    alone = {*only(left, right), *only(right, left)}
    if any(number not in {axis for run in runs(out) for axis in run} for number in alone):
        return None
    axes = Axes(runs(out), {number: sizes[label] for label, number in numbers.items()}, {})
    return Product(
        Operand(factors.left, runs(left), only(left, right)),
        Operand(factors.right, runs(right), only(right, left)),
        axes,
        summed,
        factors.factor,
        factors.added,
        factors.added_factor,
    )


def _rows_and_columns(left: Tensor, right: Tensor) -> tuple[list[str], list[str], list[str]]:
    """matmul: [..., rows, summed] times [..., summed, columns]; leading dimensions are aligned from the right."""
    before = [f"before{place}" for place in range(max(left.ndim, right.ndim) - 2, 0, -1)]
    leading = [before[len(before) - (tensor.ndim - 2) :] for tensor in (left, right)]
    return [*leading[0], "row", "summed"], [*leading[1], "summed", "column"], [*before, "row", "column"]


def _of_einsum(args: tuple[Any, ...]) -> Factors | None:
    if not args or not isinstance(args[0], str):
        return None
    operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    inputs, arrow, result = args[0].replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(operands) != 2 or len(terms) != 2 or not all(isinstance(each, Tensor) for each in operands):
        return None
    left, right = (_labels(term, tensor.ndim) for term, tensor in zip(terms, operands, strict=True))
    if arrow:
        hidden = max(sum(len(label) > 1 for label in labels) for labels in (left, right))
        out = _labels(result, len(result) - 3 + hidden if "..." in result else len(result))
    else:
        joined = terms[0] + terms[1]
        dots_first = sorted({label for label in (*left, *right) if len(label) > 1}, reverse=True)
        out = [*dots_first, *sorted(label for label in set(joined) - {"."} if joined.count(label) == 1)]
    return Factors(operands[0], operands[1], (left, right, out))


def _labels(term: str, dimensions: int) -> list[str]:
    before, dots, after = term.partition("...")
    hidden = dimensions - len(before) - len(after) if dots else 0
    return [*before, *(f"before{place}" for place in range(hidden, 0, -1)), *after]
