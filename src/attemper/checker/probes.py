"""Probes: change what should not matter, and look whether the outputs move (later tokens for ATT402, padding for ATT403, 404).

What it must hold: a probe runs only where its answer would mean something; what is put in stands elsewhere in the same input, so
that it is nothing that the model does not know; a move counts only beyond what rounding explains.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from attemper.checker.evidence import CallEvidence, Evidence, Leak, NanReach, NonFinite
from attemper.checker.inputs import Inputs
from attemper.checker.load import Subject
from attemper.checker.outputs import Outputs
from attemper.checker.thresholds import Thresholds

Run = Callable[[Subject, Inputs], Outputs]

# Language models that are not causal although their class is called so: they permute, or see their whole input.
_NOT_CAUSAL = frozenset({"xlnet", "xlm", "flaubert", "cpmant"})


def causal_claim(model: nn.Module, config: Any, inputs: Inputs, calls: tuple[CallEvidence, ...]) -> str:
    """Why the model is held to be causal, as a clause; "" where nothing says so."""
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
    own = [call for call in calls if call.self_attention and call.in_causal_part]
    heads = sum(call.heads for call in own)
    causal = heads - sum(len(call.future_heads) for call in own)
    return f"{causal} of its {heads} self-attention heads are" if causal * 2 > heads else ""


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
    """Change the later half of the tokens; None where the model claims nothing or its inputs cannot be told apart by position."""
    if not evidence.causal_claim or outputs.hidden is None:
        return None
    sequence = _sequence(inputs, _length(inputs, evidence.calls))
    if sequence is None or sequence.dim >= outputs.hidden.dim() or outputs.hidden.shape[sequence.dim] != sequence.length:
        return None
    start = sequence.length // 2
    later = torch.arange(sequence.length, device=sequence.value.device) >= start
    changed = sequence.with_value(inputs, _replaced(sequence.value, sequence.dim, start))
    if changed is None:
        return None
    after = run(subject, changed).hidden
    how_far = moved(outputs.hidden, after, sequence.dim)
    counts = ~later.unsqueeze(0).expand(how_far.shape).to(how_far.device)
    if padding is not None and padding.shape == how_far.shape:
        counts = counts & padding
    return leak(how_far, counts, outputs.hidden, start, evidence.thresholds)


def padding(
    subject: Subject, inputs: Inputs, outputs: Outputs, evidence: Evidence, padding: Tensor | None, run: Run
) -> Leak | None:
    """Change what is embedded at padded positions; None where nothing is padded, or no attention call shows padded keys."""
    if padding is None or bool(padding.all()) or outputs.hidden is None:
        return None
    if not any(call.sees_padding for call in evidence.calls) or hasattr(subject.config, "expert_capacity"):
        return None
    after = _embedded_otherwise(subject, inputs, padding, run, lambda embedded: embedded.flip(1))
    if after is None:
        return None
    how_far = moved(outputs.hidden, after, 1)
    real = padding if padding.shape == how_far.shape else torch.ones_like(how_far, dtype=torch.bool)
    return leak(how_far, real, outputs.hidden, int((~padding).any(0).int().argmax()), evidence.thresholds)


def nan_in_padding(
    subject: Subject, inputs: Inputs, outputs: Outputs, made: NonFinite | None, padding: Tensor | None, run: Run
) -> NanReach | None:
    """Put NaN into the embedding of padding, and see whether real tokens get it.

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
    after = _embedded_otherwise(subject, inputs, padding, run, lambda embedded: torch.full_like(embedded, torch.nan))
    if after is None or after.shape != hidden.shape:
        return None
    reached = after.isnan().flatten(2).any(-1) & padding
    return NanReach("" if made is None else made.module, at_padding, int(reached.sum()), int(padding.sum()))


def _embedded_otherwise(
    subject: Subject, inputs: Inputs, padding: Tensor, run: Run, change: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """The hidden states with something else embedded at padded positions; None where the embedding could not be reached."""
    embed = _reading(subject.model, inputs)
    if embed is None:
        return None
    done = False

    def disturb(_module: nn.Module, _args: Any, output: Any) -> Any:
        nonlocal done
        if done or not isinstance(output, Tensor) or output.shape[:2] != padding.shape:
            return None
        done = True
        return torch.where(padding.unsqueeze(-1), output, change(output))

    handle = embed.register_forward_hook(disturb)
    try:
        after = run(subject, inputs).hidden
    finally:
        handle.remove()
    return after if done else None


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


def _reading(model: nn.Module, inputs: Inputs) -> nn.Module | None:
    """What embeds the tokens that the inputs' mask is about: in an encoder-decoder the encoder's own, where it has one.

    The model's may be there for its weights alone, shared with the encoder's and the decoder's, and never run.
    """
    inner = getattr(model, "get_encoder", None)
    encoder = inner() if callable(inner) and "decoder_input_ids" in inputs.kwargs else None
    return (embedding(encoder) if isinstance(encoder, nn.Module) else None) or embedding(model)


def embedding(model: nn.Module) -> nn.Module | None:
    """The module that embeds the model's tokens, None where it has none or does not say."""
    getter = getattr(model, "get_input_embeddings", None)
    try:
        found = getter() if callable(getter) else None
    except (AttributeError, NotImplementedError):
        return None
    return found if isinstance(found, nn.Module) else None
