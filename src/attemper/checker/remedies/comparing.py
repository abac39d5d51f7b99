"""What the model puts out, kept before an edit and compared after it."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from attemper.checker import made_up
from attemper.checker.inputs import Inputs
from attemper.checker.load import Subject
from attemper.checker.measure import evaluating, run
from attemper.checker.padding import padding_mask
from attemper.checker.remedies.records import OutputChange
from attemper.errors import LoadError

MAX_NUMBERS = 2**27  # of logits that are kept, 512 MB in float32
_ROWS = 256  # taken to float64 at a time


@dataclass(frozen=True)
class Kept:
    """Attributes: values: [rows, width] of real positions; vocabulary: if they are logits; targets: [rows], −1 where none."""

    values: Tensor
    vocabulary: bool
    targets: Tensor


@torch.no_grad()
def outputs(subject: Subject, inputs: Inputs) -> Kept:
    """The logits over the vocabulary, or else the hidden states, of real positions.

    Raises:
        LoadError: the model cannot be run, or returns no tensor to compare.
    """
    count = made_up.vocabulary(subject.config) if subject.config is not None else None
    with evaluating(subject.model):
        kept = _logits(subject, inputs, count) if count else None
        if kept is None:
            returned = run(subject, inputs)
            values = returned.hidden if returned.hidden is not None else returned.final
            if values is None:
                raise LoadError(f"{subject.name} returns no tensor of floating-point numbers to compare")
            kept = Kept(_real(values, inputs), False, torch.empty(0, dtype=torch.int64))
    return kept


def compare(before: Kept, after: Kept) -> OutputChange:
    """How far the outputs moved."""
    squares, changes, largest = 0.0, 0.0, 0.0
    divergences, losses = [], ([], [])
    for start in range(0, len(before.values), _ROWS):
        old, new = (kept.values[start : start + _ROWS].double() for kept in (before, after))
        squares += float((old**2).sum())
        changes += float(((new - old) ** 2).sum())
        largest = max(largest, float((new - old).abs().max())) if bool(new.isfinite().all()) else math.nan
        if before.vocabulary:
            old, new = old.log_softmax(-1), new.log_softmax(-1)
            divergences.append(F.kl_div(new, old, log_target=True, reduction="none").sum(-1))
            targets = before.targets[start : start + _ROWS]
            for each, rows in zip(losses, (old, new), strict=True):
                each.append(-rows[targets >= 0].gather(1, targets[targets >= 0, None]))
    kl = torch.cat(divergences) if divergences else None
    one, other = (torch.cat(each) if each else torch.empty(0) for each in losses)
    return OutputChange(
        what="logits" if before.vocabulary else "hidden states",
        positions=len(before.values),
        largest=largest,
        typical=math.sqrt(squares / max(1, before.values.numel())),
        relative=math.sqrt(changes / squares) if squares else math.nan,
        kl=None if kl is None else float(kl.mean()),
        kl_largest=None if kl is None else float(kl.max()),
        loss_before=float(one.mean()) if one.numel() else None,
        loss_after=float(other.mean()) if other.numel() else None,
    )


def _logits(subject: Subject, inputs: Inputs, count: int) -> Kept | None:
    """The logits over the vocabulary at as many positions as fit, with the next token where the model predicts it."""
    inputs = _shortened(inputs, count)
    keeps = {"logits_to_keep": 0} if "logits_to_keep" in made_up.parameters(subject.model) else {}  # 0: all of them
    values = run(subject, Inputs(inputs.args, inputs.kwargs | keeps, inputs.description)).final
    ids = inputs.kwargs.get("decoder_input_ids", inputs.kwargs.get("input_ids"))
    if values is None or ids is None or values.shape[:-1] != ids.shape or values.shape[-1] < count:
        return None
    targets = torch.full_like(ids, -1)
    mask = padding_mask(inputs)
    if type(subject.model).__name__.endswith("ForCausalLM") and not getattr(subject.config, "is_encoder_decoder", False):
        targets[:, :-1] = ids[:, 1:]
        if mask is not None and mask.shape == ids.shape:
            targets[:, :-1][~mask[:, 1:]] = -1
    return Kept(_real(values, inputs), True, _real(targets[..., None], inputs)[:, 0])


def _shortened(inputs: Inputs, count: int) -> Inputs:
    ids = inputs.kwargs.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.numel() * count <= MAX_NUMBERS:
        return inputs
    most = max(2, MAX_NUMBERS // (count * ids.shape[0]))
    cut = {
        name: value[:, :most] if isinstance(value, Tensor) and value.shape[:2] == ids.shape else value
        for name, value in inputs.kwargs.items()
    }
    return Inputs(inputs.args, cut, inputs.description)


def _real(values: Tensor, inputs: Inputs) -> Tensor:
    """[rows, width]: the positions that are not padding."""
    mask = padding_mask(inputs)
    if mask is not None and values.shape[:2] == mask.shape:
        return values[mask]
    return values.flatten(0, -2) if values.ndim > 1 else values[None]
