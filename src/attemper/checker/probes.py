"""The probe of the future: change later tokens, and look whether earlier outputs move (ATT402); what all probes measure by.

What it must hold: a probe runs only where its answer would mean something; what is put in stands elsewhere in the same input, so
that it is nothing that the model does not know; a move counts only beyond what rounding explains.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from attemper.checker.evidence import CallEvidence, Evidence, Leak
from attemper.checker.inputs import Inputs
from attemper.checker.load import Subject
from attemper.checker.outputs import Outputs
from attemper.checker.thresholds import Thresholds

Run = Callable[[Subject, Inputs], Outputs]

# Language models that are not causal although their class is called so: they permute, or see their whole input.
_NOT_CAUSAL = frozenset({"xlnet", "xlm", "flaubert", "cpmant"})


def causal_claim(model: nn.Module, config: Any, inputs: Inputs, calls: tuple[CallEvidence, ...]) -> str:
    """Why the model is held to be causal, as a clause; "" where nothing says so."""
    said = _said(model, config, inputs, calls)
    if said is not None:
        return said
    heads, causal, _ = _by_masks(calls)
    return f"{causal} of its {heads} self-attention heads are" if causal * 2 > heads else ""


def nearly_causal(model: nn.Module, config: Any, inputs: Inputs, calls: tuple[CallEvidence, ...]) -> str:
    """What is amiss with masks that would be causal but for a few pairs, as a clause; "" where something else is known."""
    heads, causal, nearly = _by_masks(calls)
    if not causal * 2 <= heads < (causal + nearly) * 2 or _said(model, config, inputs, calls) is not None:
        return ""
    seeing = [call for call in _own(calls) if call.near_heads]
    worst = max(seeing, key=lambda call: call.ahead.pairs)
    some = "1 pair" if worst.ahead.pairs == 1 else f"{worst.ahead.pairs} pairs"
    return (
        f"the mask is causal but for {some} (query {worst.ahead.query} sees key {worst.ahead.key}) in "
        f"{listed([call.module for call in seeing])}"
    )


def _said(model: nn.Module, config: Any, inputs: Inputs, calls: tuple[CallEvidence, ...]) -> str | None:
    """Why it is held to be causal by what it or its configuration says; "": it is said not to be; None: nothing is said."""
    if config is not None:
        if getattr(config, "is_causal", None) is False or getattr(config, "use_bidirectional_attention", None):
            return ""
        if config.model_type in _NOT_CAUSAL or hasattr(config, "expert_capacity"):
            return ""  # with a capacity, tokens compete for experts, so they depend on one another by design
        if getattr(config, "is_encoder_decoder", False):
            return "it is the decoder of an encoder-decoder" if "decoder_input_ids" in inputs.kwargs else ""
        decodes = _decodes(model, inputs)
        if decodes is None and getattr(config, "is_decoder", False):
            return "its configuration says is_decoder"
        if decodes is not None:
            return "it is run with is_decoder" if decodes else ""
    if getattr(model, "is_causal", None) is True:
        return "it says is_causal"
    modules = dict(model.named_modules())
    says = [getattr(modules.get(call.module), "is_causal", None) for call in calls if call.self_attention]
    class_name = type(model).__name__
    if class_name.endswith(("ForCausalLM", "LMHeadModel")) and not (says and all(word is False for word in says)):
        return f"it is a {class_name}"
    if config is not None and sum(word is True for word in says) * 2 > len(says):
        return "most of its attention modules say is_causal"
    return None


def _no_block(call: CallEvidence) -> bool:
    """Whether later keys that a mask shows are no prefix and no image, which models that are causal besides may see whole."""
    return bool(call.near_heads) or call.ahead.pairs == call.queries * (call.queries - 1) // 2


def _own(calls: tuple[CallEvidence, ...]) -> list[CallEvidence]:
    return [call for call in calls if call.self_attention and call.in_causal_part]


def _by_masks(calls: tuple[CallEvidence, ...]) -> tuple[int, int, int]:
    """How many self-attention heads there are, how many are causal by their masks, and how many but for a few pairs."""
    own = _own(calls)
    heads = sum(call.heads for call in own)
    return heads, heads - sum(len(call.future_heads) for call in own), sum(len(call.near_heads) for call in own)


def _decodes(model: nn.Module, inputs: Inputs) -> bool | None:
    """What the argument is_decoder says where the model takes one, as BLIP does, whatever its configuration says."""
    argument = inspect.signature(model.forward).parameters.get("is_decoder")
    return None if argument is None else bool(inputs.kwargs.get("is_decoder", argument.default))


def in_causal_part(model: nn.Module, config: Any, module: str) -> bool:
    """False for what belongs to the encoder of an encoder-decoder."""
    if not getattr(config, "is_encoder_decoder", False):
        return True
    return "encoder" not in module.split(".")


def future(
    subject: Subject, inputs: Inputs, outputs: Outputs, evidence: Evidence, padding: Tensor | None, run: Run
) -> Leak | None:
    """Change the later half of the tokens; None where the model claims nothing or its inputs cannot be told apart by position.

    Where that moved nothing, and a mask is missing or wrong in a few pairs, the tokens from the first later key on are changed.
    """
    if not (evidence.causal_claim or evidence.nearly_causal) or outputs.hidden is None:
        return None
    length = _length(inputs, evidence.calls)
    sequence = _sequence(inputs, length)
    if sequence is None or sequence.dim >= outputs.hidden.dim() or outputs.hidden.shape[sequence.dim] != sequence.length:
        return None
    shown = [call.ahead.key for call in _own(evidence.calls) if 0 < call.ahead.key < length and _no_block(call)]
    found = None
    for start in (sequence.length // 2, *dict.fromkeys(shown)):
        changed = sequence.with_value(inputs, _replaced(sequence.value, sequence.dim, start))
        if changed is None:
            continue
        how_far = moved(outputs.hidden, run(subject, changed).hidden, sequence.dim)
        counts = (torch.arange(sequence.length, device=how_far.device) < start).unsqueeze(0).expand(how_far.shape)
        if padding is not None and padding.shape == how_far.shape:
            counts = counts & padding
        leaked = leak(how_far, counts, outputs.hidden, start, evidence.thresholds)
        if leaked is not None and leaked.leaks:
            return leaked
        found = found or leaked
    return found


@dataclass(frozen=True)
class _Sequence:
    """The input that runs over positions: its name or index, the dimension of positions."""

    place: str | int
    value: Tensor
    dim: int

    @property
    def length(self) -> int:
        return self.value.shape[self.dim]

    def with_value(self, inputs: Inputs, value: Tensor) -> Inputs | None:
        if torch.equal(value, self.value):
            return None
        if isinstance(self.place, str):
            return replace(inputs, kwargs={**inputs.kwargs, self.place: value})
        args = list(inputs.args)
        args[self.place] = value
        return replace(inputs, args=tuple(args))


def _length(inputs: Inputs, calls: tuple[CallEvidence, ...]) -> int:
    """How many positions the causal part has."""
    for name in ("decoder_input_ids", "input_ids"):
        if isinstance(ids := inputs.kwargs.get(name), Tensor) and ids.dim() == 2:
            return ids.shape[1]
    return max((call.queries for call in calls if call.self_attention and call.in_causal_part), default=0)


def _sequence(inputs: Inputs, length: int) -> _Sequence | None:
    """The input to change: the decoder's if there is one, else the first with that many positions (batch first or second)."""
    preferred = ("decoder_input_ids", "tgt", "input_ids")
    named = sorted(inputs.kwargs.items(), key=lambda item: preferred.index(item[0]) if item[0] in preferred else len(preferred))
    for place, value in [*named, *enumerate(inputs.args)]:
        if not isinstance(value, Tensor) or value.dim() < 2 or value.dtype == torch.bool or "mask" in str(place):
            continue
        for dim in (1, 0):
            if value.shape[dim] == length >= 4:
                return _Sequence(place, value, dim)
    return None


def _replaced(value: Tensor, dim: int, start: int) -> Tensor:
    """The later half replaced by the earlier one, backwards: other content, but nothing new."""
    length = value.shape[dim]
    source = torch.arange(length, device=value.device)
    source[start:] = (start - 1 - torch.arange(length - start, device=value.device)) % start
    replaced = value.index_select(dim, source)
    if torch.equal(replaced, value) and not value.is_floating_point():
        later = (torch.arange(length, device=value.device) >= start).view([-1 if d == dim else 1 for d in range(value.dim())])
        replaced = torch.where(later & (value > 0), value - 1, value)
    return replaced


def moved(before: Tensor, after: Tensor | None, dim: int) -> Tensor:
    """[batch, positions]: how far each position's output moved; NaN where it cannot be said."""
    if after is None or after.shape != before.shape:
        return before.new_full(before.shape[:2], math.nan)
    difference = (after.float() - before.float()).abs()
    rest = tuple(d for d in range(2, before.dim()))
    by_position = difference.amax(rest) if rest else difference
    return by_position if dim == 1 else by_position.T


def leak(moved: Tensor, counts: Tensor, before: Tensor, changed: int, limits: Thresholds) -> Leak | None:
    """What moved among the positions that count, against what rounding explains; None where it could not be measured."""
    shown = torch.where(counts, moved, 0.0)
    if bool(shown.isnan().any()):
        return None
    allowed = limits.leak_roundings * math.sqrt(torch.finfo(before.dtype).eps) * float(before.float().abs().max())
    beyond = shown > allowed
    first = int(beyond.any(0).int().argmax()) if bool(beyond.any()) else -1
    return Leak(float(shown.max()), allowed, int(beyond.sum()), first, changed)


def listed(modules: Sequence[str], most: int = 3) -> str:
    """Names of modules with commas, the first few."""
    names = list(dict.fromkeys(modules))
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
