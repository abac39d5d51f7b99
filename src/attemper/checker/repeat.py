"""Whether a model agrees with itself: run twice on the same inputs in evaluation mode, it should, but for rounding.

What it must hold: a model that draws random numbers is told as such, and not as one that sees the future or depends on its batch.
"""

import torch
from torch import Tensor

from attemper.checker.inputs import Inputs
from attemper.checker.load import Subject
from attemper.checker.outputs import Outputs
from attemper.checker.probes import Run, leak
from attemper.checker.thresholds import Thresholds
from attemper.errors import LoadError

# Two draws may lie nearer than the next two, so that a share of what the probes hold against a model is too much already.
SHARE = 1 / 4


def apart_when_repeated(subject: Subject, inputs: Inputs, outputs: Outputs, limits: Thresholds, run: Run) -> str:
    """By how much the outputs part when the model is run again, in words; "" where rounding explains it."""
    before = outputs.hidden
    if before is None or not before.numel():
        return ""
    try:
        after = run(subject, inputs).hidden
    except LoadError as error:
        return _words(f"it fails the second time ({error})")
    if after is None or after.shape != before.shape:
        return _words("its outputs have another shape the second time")
    apart = (after.float() - before.float()).abs()
    apart = torch.where(before.isnan() & after.isnan() | (before == after), 0.0, apart)
    found = leak(apart.flatten(), torch.ones_like(apart, dtype=torch.bool).flatten(), _finite(before), 0, limits)
    if found is None:  # NaN in one of them only
        return _words("NaN comes and goes in its outputs")
    if found.moved <= SHARE * found.allowed:
        return ""
    largest = float(_finite(before).abs().max())
    return _words(
        f"its outputs part by up to {found.moved:.3g} (the largest is {largest:.3g}; rounding explains {found.allowed:.2g})"
    )


def _words(how: str) -> str:
    return (
        f"it is not deterministic: run twice on the same inputs, in evaluation mode, {how}; so what later tokens, padding, a "
        "cache and a batch change was not tried (ATT402, ATT403, ATT405, ATT406)"
    )


def _finite(tensor: Tensor) -> Tensor:
    return tensor.float().nan_to_num(0.0, 0.0, 0.0).to(tensor.dtype)
