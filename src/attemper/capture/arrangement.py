"""Which axes of a product are batch, heads, queries and keys, decided at the softmax: it runs over the keys."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from attemper.capture.axes import Axes, Group
from attemper.capture.chains import Chain, formula
from attemper.capture.products import Operand


@dataclass(frozen=True)
class Arrangement:
    """Batch, heads, queries and keys as runs of axes.

    Attributes:
        axes: of the logits. query, key: the operands of the product.
    """

    axes: Axes
    query: Operand
    key: Operand
    batch: Group
    heads: Group
    queries: Group
    keys: Group

    @property
    def runs(self) -> tuple[Group, ...]:
        """The four runs as they are now, after later splits."""
        return tuple(self.axes.leaves(run) for run in (self.batch, self.heads, self.queries, self.keys))

    @property
    def order(self) -> Group:
        """All axes in one row."""
        return tuple(axis for run in self.runs for axis in run)

    def place(self, tensor: Tensor, groups: Sequence[Group]) -> Tensor:
        """Anything that broadcasts to the logits, as [batch or 1, heads or 1, queries or 1, keys or 1]."""
        return self.fold(self.axes.laid_out(tensor, groups, self.order))

    def fold(self, tensor: Tensor) -> Tensor:
        """One dimension for each axis → [batch or 1, heads or 1, queries or 1, keys or 1]."""
        return self.axes.folded(tensor, self.runs)

    def operand(self, tensor: Tensor, groups: Sequence[Group], tokens: int, width: Group) -> Tensor:
        """A factor as [batch, its own heads, tokens, width]; `tokens` is 2 for queries and 3 for keys."""
        batch, heads, run = self.runs[0], self.runs[1], self.runs[tokens]
        own = {
            axis for length, group in zip(tensor.shape, groups, strict=True) if length != 1 for axis in self.axes.leaves(group)
        }
        shared = next((place for place in range(len(heads), 0, -1) if heads[place - 1] in own), 0)
        if tokens == 3:
            heads = heads[:shared]  # grouped heads: the queries' own are the last part of the run
        laid = self.axes.laid_out(tensor, groups, (*batch, *heads, *run, *width))
        folded = self.axes.folded(laid, (batch, heads, run, width))
        return folded.expand(self.axes.size(batch), self.axes.size(heads), *folded.shape[2:])

    def logits(self, chain: Chain) -> "tuple[float | Tensor, float | Tensor | None, Tensor | None]":
        """Scale, softcap and bias of the chain: numbers, or tensors that broadcast to [batch, heads, queries(, keys)]."""
        scale, softcap, bias = formula(chain, self.axes, self.order, len(self.runs[3]))
        bias = None if bias is None else self.fold(bias)
        softcap = self.fold(softcap) if isinstance(softcap, Tensor) else softcap
        return self.fold(scale) if isinstance(scale, Tensor) else scale, softcap, bias


def arranged(chain: Chain, dim: int, heads: int | None) -> Arrangement | None:
    """Read the axes off the logits; None where the softmax does not run over the rows or the columns of the product.

    Args:
        dim: the dimension of the softmax; heads: how many the module says it has, or None.
    """
    axes, product = chain.axes, chain.product
    keys = axes.groups[dim]
    left, right = (set(axes.leaves(operand.own)) for operand in (product.left, product.right))
    if set(keys) <= right:
        query, key = product.left, product.right
    elif set(keys) <= left:
        query, key = product.right, product.left
    else:
        return None
    own = set(axes.leaves(query.own))
    others = [group for place, group in enumerate(axes.groups) if place != dim % len(axes.groups)]
    queries = next((run for group in others[::-1] if (run := tuple(axis for axis in group if axis in own))), ())
    leading = tuple(axis for group in others for axis in group if axis not in queries)
    axes, batch, run = _split(axes, leading, heads)
    if run is None:
        rest = tuple(axis for axis in leading if axis in own)
        if rest and axes.size(queries) == heads:  # "bqhd,bkd->bqhk": heads are rows of the product, behind the queries
            batch, run, queries = tuple(axis for axis in leading if axis not in rest), queries, rest
        else:
            batch, run = leading[:-1], leading[-1:]
    return Arrangement(axes, query, key, batch, run, queries, keys)


def _split(axes: Axes, leading: Group, heads: int | None) -> tuple[Axes, Group, Group | None]:
    """Batch and heads; the last neighbouring axes that make up as many heads as the module has, or a part of the last one."""
    if heads is None:
        return axes, (), None
    if heads == 1:
        return axes, leading, ()
    for end in range(len(leading), 0, -1):
        for start in range(end - 1, -1, -1):
            if axes.size(leading[start:end]) == heads:
                return axes, leading[:start] + leading[end:], leading[start:end]
    if leading and axes.sizes[leading[-1]] % heads == 0:
        last = leading[-1]
        axes = axes.split(last, heads)
        return axes, (*leading[:-1], axes.parts[last][0]), axes.parts[last][1:]
    return axes, (), None
