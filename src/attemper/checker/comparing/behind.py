"""What lies behind the last attention call: outputs that part although attention does not, against what rounding explains.

What it must hold: outputs are held to the same budget as logits; only positions that are no padding count; what cannot be
compared is not called alike.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from attemper.checker.comparing.gaps import subtract
from attemper.checker.comparing.records import OutputGap, Parting
from attemper.checker.comparing.rounding import BUDGET
from attemper.checker.comparing.weights import differing
from attemper.checker.outputs import Outputs

_MOST_NAMES = 4


def kept(outputs: Outputs) -> Outputs:
    """Copies on the CPU of what is compared."""
    hidden = None if outputs.hidden is outputs.final else outputs.hidden
    return Outputs(*(None if each is None else each.detach().to("cpu", copy=True) for each in (outputs.final, hidden)))


def output_gaps(
    one: Outputs, two: Outputs, peers: list[Outputs], padding: Tensor | None, roundoff: float
) -> tuple[OutputGap, ...]:
    """How far the outputs of two runs are apart; () where they have none of one shape.

    Args:
        one, two: of A and B; peers: of the coarser of the two, with roundings drawn anew, behind the one that they belong to.
        padding: the inputs' mask, bool [batch, tokens], True = real; roundoff: the coarser dtype's.
    """
    return tuple(_gaps(one, two, peers, padding, roundoff))


def _gaps(one: Outputs, two: Outputs, peers: list[Outputs], padding: Tensor | None, roundoff: float) -> Iterator[OutputGap]:
    for name, place in (("hidden", "last hidden states"), ("final", "outputs")):
        a, b = getattr(one, name), getattr(two, name)
        if a is None or b is None or a.shape != b.shape or not a.numel():
            continue
        counted = _counted(a, padding)
        drawn = [
            _largest(getattr(peer, name), getattr(peers[0], name), counted)
            for peer in peers[1:]
            if getattr(peer, name) is not None and getattr(peer, name).shape == a.shape == getattr(peers[0], name).shape
        ]
        size = max(float(torch.where(counted, x.double().nan_to_num(0.0, 0.0, 0.0), 0.0).abs().max()) for x in (a, b))
        own = max((each for each in drawn if each < torch.inf), default=0.0)
        yield OutputGap(place, _largest(a, b, counted), BUDGET * own + 2 * roundoff * size)


def parting_behind(gaps: tuple[OutputGap, ...], row: int, module: str, a: nn.Module, b: nn.Module) -> Parting | None:
    """The parting of outputs that are apart behind the last attention call, which `module` made; None where none is."""
    beyond = [gap for gap in gaps if gap.parts]
    if not beyond:
        return None
    below = any(gap.place == "last hidden states" for gap in gaps)
    head = below and beyond[0].place == "outputs"
    begins = (
        "in what makes the outputs of the last hidden states (the head): those agree"
        if head
        else f"behind the last attention call, in {module or 'the model itself'}: attention agrees to the end"
    )
    names = differing(a, b)
    told = f"; {_some(names)}" if names else "; their parameters are equal, so that the code differs" if names == () else ""
    apart = " and ".join(
        f"the {gap.place} differ by up to {gap.difference:.2g} (rounding explains {gap.allowed:.2g})" for gap in beyond
    )
    return Parting(
        row, (), "outputs", None, f"the difference begins {begins}; {apart}{told}", parameters=(names or ())[-_MOST_NAMES:]
    )


def _some(names: tuple[str, ...]) -> str:
    """The last of them: they stand nearest to the outputs."""
    shown = ", ".join(names[-_MOST_NAMES:])
    return f"parameters differ in {shown}" + (f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else "")


def _counted(values: Tensor, padding: Tensor | None) -> Tensor:
    """bool, broadcastable to the values: those at real positions, where the mask fits; the head may give the last only."""
    everywhere = torch.ones([1] * values.dim(), dtype=torch.bool)
    if padding is None or values.dim() < 3 or values.shape[0] != padding.shape[0] or values.shape[1] > padding.shape[1]:
        return everywhere
    return padding[:, -values.shape[1] :].cpu().reshape(*values.shape[:2], *[1] * (values.dim() - 2))


def _largest(one: Any, two: Any, counted: Tensor) -> float:
    return float(torch.where(counted, subtract(two.double(), one.double()), 0.0).abs().max())
