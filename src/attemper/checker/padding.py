"""Padding: which positions are, and whether what stands there reaches real tokens (ATT403, ATT404).

What it must hold: what is put in stands elsewhere in the same input, so that it is nothing that the model does not know; it is
put where the model reads its tokens, behind what it makes of their ids (masks, positions); what could not be tried is told.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from attemper.capture.record import HIDDEN
from attemper.checker.evidence import Evidence, Leak, NanReach, NonFinite
from attemper.checker.inputs import Inputs
from attemper.checker.load import Subject
from attemper.checker.outputs import Outputs
from attemper.checker.probes import Run, leak, moved
from attemper.errors import LoadError

MASK = "attention_mask"


@dataclass(frozen=True)
class Untried:
    """A probe that could not be run, and why, in words."""

    words: str


def padding_mask(inputs: Inputs) -> Tensor | None:
    """The inputs' own attention mask as bool [batch, tokens], True = real; None where there is none of that form.

    Of floats it is read where it holds 1 and 0 (1 = real), or 0 and large negative numbers (0 = real).
    """
    mask = inputs.kwargs.get(MASK)
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    if not mask.is_floating_point():
        return mask.bool()
    blank = mask == 0
    if bool((blank | (mask == 1)).all()):
        return ~blank if bool(mask.any()) else blank  # nothing but zeros hides nothing: it is there to be added
    return blank if bool((blank | (mask <= HIDDEN)).all()) else None


def padding_leak(
    subject: Subject, inputs: Inputs, outputs: Outputs, evidence: Evidence, padding: Tensor | None, run: Run
) -> Leak | Untried | None:
    """Change what stands at padded positions; None where nothing is padded, or no attention call shows padded keys."""
    if padding is None:
        mask = inputs.kwargs.get(MASK)
        shape = list(mask.shape) if isinstance(mask, Tensor) else None
        form = "" if shape is None else " of other numbers than 0 and 1" if len(shape) == 2 else f" of shape {shape}"
        return Untried(f"an {MASK}{form} does not say which tokens are padding") if form else None
    if bool(padding.all()) or outputs.hidden is None:
        return None
    if not any(call.sees_padding for call in evidence.calls) or hasattr(subject.config, "expert_capacity"):
        return None
    try:
        after = _read_otherwise(subject, inputs, padding, run, lambda read: _other(read, padding))
    except LoadError as error:
        return Untried(str(error))
    if isinstance(after, Untried):
        return after
    how_far = moved(outputs.hidden, after, 1)
    real = padding if padding.shape == how_far.shape else torch.ones_like(how_far, dtype=torch.bool)
    return leak(how_far, real, outputs.hidden, int((~padding).any(0).int().argmax()), evidence.thresholds)


def nan_in_padding(
    subject: Subject, inputs: Inputs, outputs: Outputs, made: NonFinite | None, padding: Tensor | None, run: Run
) -> NanReach | None:
    """Put NaN where padding is read, and see whether real tokens get it.

    Only where the model makes NaN at padded positions itself: 0·NaN is NaN in every kernel that multiplies hidden weights, so
    without one the answer would say nothing of the model.

    Args:
        made: the first NaN or infinity of the run, none of which reached a real token; None: there was none.
    """
    hidden = outputs.hidden
    if padding is None or bool(padding.all()) or hidden is None or hidden.shape[:2] != padding.shape:
        return None
    at_padding = int((hidden.isnan().flatten(2).any(-1) & ~padding).sum())
    if not at_padding and (made is None or made.kind != "NaN"):
        return None
    after = _read_otherwise(subject, inputs, padding, run, _nan)
    if not isinstance(after, Tensor) or after.shape != hidden.shape:
        return None
    reached = after.isnan().flatten(2).any(-1) & padding
    return NanReach("" if made is None else made.module, at_padding, int(reached.sum()), int(padding.sum()))


def embedding(model: nn.Module) -> nn.Module | None:
    """The module that embeds the model's tokens, None where it has none or does not say."""
    getter = getattr(model, "get_input_embeddings", None)
    try:
        found = getter() if callable(getter) else None
    except (AttributeError, NotImplementedError):
        return None
    return found if isinstance(found, nn.Module) else None


def _read_otherwise(
    subject: Subject, inputs: Inputs, padding: Tensor, run: Run, change: Callable[[Tensor], Tensor | None]
) -> Tensor | Untried:
    """The hidden states with something else at padded positions.

    It is put into the embedding that the model names, else into each that reads the ids as they were given, else into the inputs.
    """
    place = _by_position(inputs, padding)
    named = _reading(subject.model, inputs)
    if named is not None:
        after = _embedded_otherwise([named], None, subject, inputs, padding, run, change)
        if after is not None:
            return after
    if place is None:
        return Untried("none of the inputs has a number or a vector for each position of the mask")
    value = inputs.kwargs[place]
    if not value.is_floating_point():
        tables = [module for module in subject.model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
        after = _embedded_otherwise(tables, value, subject, inputs, padding, run, change)
        if after is not None:
            return after
    other = change(value)
    if other is None or torch.equal(kept := _where(padding, value, other), value):
        return Untried(f"no embedding reads {place}, and there is nothing else to put in there")
    after = run(subject, replace(inputs, kwargs={**inputs.kwargs, place: kept})).hidden
    return Untried("the model returned no output by position") if after is None else after


def _embedded_otherwise(
    modules: Sequence[nn.Module],
    ids: Tensor | None,
    subject: Subject,
    inputs: Inputs,
    padding: Tensor,
    run: Run,
    change: Callable[[Tensor], Tensor | None],
) -> Tensor | None:
    """The hidden states with something else embedded at padded positions; None where none of the modules was reached.

    Args:
        ids: what a module must be given for its output to be changed; None: anything, the first time.
    """
    done = False

    def disturb(_module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        nonlocal done
        if not isinstance(output, Tensor) or output.shape[:2] != padding.shape:
            return None
        if done if ids is None else not _is(ids, next(iter((*args, *kwargs.values())), None)):
            return None
        other = change(output)
        if other is None or torch.equal(kept := _where(padding, output, other), output):
            return None
        done = True
        return kept

    handles = [module.register_forward_hook(disturb, with_kwargs=True) for module in modules]
    try:
        after = run(subject, inputs).hidden if handles else None
    finally:
        for handle in handles:
            handle.remove()
    return after if done else None


def _is(ids: Tensor, given: Any) -> bool:
    return isinstance(given, Tensor) and given.shape == ids.shape and bool((given == ids).all())


def _by_position(inputs: Inputs, padding: Tensor) -> str | None:
    """Name of the input with a number or a vector for each position of the mask: the tokens."""
    first = ("input_ids", "inputs_embeds")
    names = [*first, *(name for name in inputs.kwargs if name not in first and "mask" not in name and "position" not in name)]
    for name in names:
        value = inputs.kwargs.get(name)
        if isinstance(value, Tensor) and value.dtype != torch.bool and value.shape[:2] == padding.shape:
            return name
    return None


def _where(padding: Tensor, kept: Tensor, other: Tensor) -> Tensor:
    return torch.where(padding.view(*padding.shape, *[1] * (kept.dim() - 2)), kept, other)


def _other(value: Tensor, padding: Tensor) -> Tensor:
    """What stands at the other end of the same sequence; of ids the one before, where that is the same."""
    other = value.flip(1)
    if value.is_floating_point() or not torch.equal(_where(padding, value, other), value):
        return other
    return torch.where(value > 0, value - 1, value)


def _nan(value: Tensor) -> Tensor | None:
    return torch.full_like(value, torch.nan) if value.is_floating_point() else None


def _reading(model: nn.Module, inputs: Inputs) -> nn.Module | None:
    """What embeds the tokens that the inputs' mask is about: in an encoder-decoder the encoder's own, where it has one.

    The model's may be there for its weights alone, shared with the encoder's and the decoder's, and never run.
    """
    inner = getattr(model, "get_encoder", None)
    encoder = inner() if callable(inner) and "decoder_input_ids" in inputs.kwargs else None
    return (embedding(encoder) if isinstance(encoder, nn.Module) else None) or embedding(model)
