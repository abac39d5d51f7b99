"""Short runs that should agree: a sequence alone, in a batch beside others, padded on either side, and continued from a cache.

What it must hold: only what the model says it takes is tried; a few tokens are enough, so that each run costs little; outputs
part only beyond what rounding explains, since kernels of other shapes sum in another order.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from attemper.capture import AttentionCall, capture
from attemper.checker import made_up
from attemper.checker.evidence import Batching, Continuation, Evidence, Leak
from attemper.checker.inputs import Inputs
from attemper.checker.load import Subject
from attemper.checker.outputs import CACHES, Outputs
from attemper.checker.probes import Run, leak, moved
from attemper.checker.visibility import causal_alignment
from attemper.errors import LoadError

TOKENS, PADDED, CONTINUED = 16, 4, 3  # length of the sequence, padding beside it, and its last tokens that a cache continues
_NO_CACHE = (
    "it takes use_cache, and no cache that is known as one came back (an output by the name of cache or past_key_values, or one "
    "with keys and values by layer), or its outputs could not be compared"
)
_KNOWN = {"input_ids", "attention_mask", "token_type_ids", "decoder_input_ids"}


@dataclass(frozen=True)
class Agreement:
    """Outcomes: batching, continuation: None where not tried; untried: what failed to run, in words."""

    batching: Batching | None = None
    continuation: Continuation | None = None
    untried: tuple[str, ...] = ()


def agreement(subject: Subject, inputs: Inputs, evidence: Evidence, padding: Tensor | None, run: Run) -> Agreement:
    """Run a few tokens of the inputs alone, in a batch and from a cache; nothing where the inputs are not token ids."""
    ids = inputs.kwargs.get("input_ids")
    if inputs.args or not set(inputs.kwargs) <= _KNOWN or not isinstance(ids, Tensor) or ids.dim() != 2:
        return Agreement()
    if ids.is_floating_point() or hasattr(subject.config, "expert_capacity") or not evidence.calls:
        return Agreement()  # with a capacity, tokens compete for experts
    row = 0 if padding is None else int(padding.sum(1).argmax())
    real = ids[row] if padding is None or padding.shape != ids.shape else ids[row][padding[row]]
    length = min(TOKENS, len(real) - PADDED)
    if length < 2 * CONTINUED:
        return Agreement()
    short = _Short(subject, inputs, real, length, _pad(subject, ids, padding))
    accepted = made_up.parameters(subject.model)
    causal = bool(evidence.causal_claim) and not (evidence.future is not None and evidence.future.leaks)
    taken = next((name for name in CACHES if name in accepted), None)
    cached = causal and taken is not None and "decoder_input_ids" not in accepted
    continues = cached and "use_cache" in accepted
    untried: list[str] = []
    if cached and not continues:
        untried.append(f"whether a cache continues it was not tried: it takes {taken}, and no use_cache to ask for one")
    try:
        alone = run(subject, short.alone()).hidden
    except LoadError as error:
        return Agreement(untried=(f"whether a sequence depends on its batch could not be tried: {error}",))
    if alone is None or alone.shape[:2] != (1, length) or not bool(alone.isfinite().all()):
        return Agreement()
    batching = continuation = None
    try:
        batching = _batching(short, alone, evidence, run)
    except LoadError as error:
        untried.append(f"whether a sequence depends on its batch could not be tried: {error}")
    if continues and taken is not None:
        try:
            continuation = _continuation(short, alone, evidence, taken, run)
            if continuation is None:
                untried.append(f"whether a cache continues it was not tried: {_NO_CACHE}")
        except LoadError as error:
            untried.append(f"whether a cache continues it could not be tried: {error}")
    return Agreement(batching, continuation, tuple(untried))


@dataclass(frozen=True)
class _Short:
    """The sequence that is run in several ways: the first `length` of the real tokens of one row."""

    subject: Subject
    inputs: Inputs
    real: Tensor
    length: int
    pad: int

    def alone(self) -> Inputs:
        return self._of(self.real[None, : self.length])

    def beside(self) -> Inputs:
        """Without padding, and with another sequence of the same length below it."""
        return self._of(torch.stack([self.real[: self.length], self._other(self.length)]))

    def padded(self, *, left: bool) -> Inputs:
        """Padded on the right in row 0, on the left in row 1 (if so wanted), beside a longer sequence."""
        blank = self.real.new_full((PADDED,), self.pad)
        sequence = self.real[: self.length]
        rows = [torch.cat([sequence, blank]), *([torch.cat([blank, sequence])] if left else [])]
        mask = torch.ones(len(rows) + 1, self.length + PADDED, dtype=torch.int64, device=self.real.device)
        mask[0, self.length :] = 0
        mask[1:-1, :PADDED] = 0
        extra = {"attention_mask": mask}
        if left:
            extra["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
        return self._of(torch.stack([*rows, self._other(self.length + PADDED)]), extra)

    def part(self, start: int, stop: int, **extra: Any) -> Inputs:
        return self._of(self.real[None, start:stop], extra)

    def _other(self, length: int) -> Tensor:
        return self.real[:length].flip(0)

    def _of(self, ids: Tensor, extra: dict[str, Any] | None = None) -> Inputs:
        kwargs: dict[str, Any] = {"input_ids": ids, **(extra or {})}
        if "token_type_ids" in self.inputs.kwargs:
            kwargs["token_type_ids"] = torch.zeros_like(ids)
        if isinstance(decoder := self.inputs.kwargs.get("decoder_input_ids"), Tensor):
            kwargs["decoder_input_ids"] = decoder[:1, : self.length].expand(len(ids), -1)
        return replace(self.inputs, kwargs=kwargs, description="a few of its tokens")


def _batching(short: _Short, alone: Tensor, evidence: Evidence, run: Run) -> Batching | None:
    accepted = made_up.parameters(short.subject.model)
    decodes = "decoder_input_ids" in short.inputs.kwargs

    def parted(after: Outputs, row: int, start: int) -> Leak | None:
        hidden = after.hidden
        if hidden is None or hidden.dim() != alone.dim() or hidden.shape[0] <= row:
            return None
        kept = hidden[row : row + 1, start : start + alone.shape[1]]
        how_far = moved(alone, kept, 1)
        return leak(how_far, torch.ones_like(how_far, dtype=torch.bool), alone, start, evidence.thresholds)

    if "attention_mask" not in accepted:
        return Batching(None, None, parted(run(short.subject, short.beside()), 0, 0))
    left = bool(evidence.causal_claim) and "position_ids" in accepted and not decodes
    after = run(short.subject, short.padded(left=left))
    on_right = parted(after, 0, 0)
    on_left = parted(after, 1, 0 if decodes else PADDED) if left else None
    parts = any(each is not None and each.leaks for each in (on_right, on_left))
    # Only where something is wrong is it worth a run to tell padding from company.
    beside = parted(run(short.subject, short.beside()), 0, 0) if parts else None
    return Batching(on_right, on_left, beside)


def _continuation(short: _Short, alone: Tensor, evidence: Evidence, taken: str, run: Run) -> Continuation | None:
    subject, start = short.subject, short.length - CONTINUED
    kept = run(subject, short.part(0, start, use_cache=True)).cache
    if kept is None:
        return None
    seen: list[tuple[str, str]] = []

    def observe(call: AttentionCall) -> None:
        if alignment := causal_alignment(call):
            seen.append((call.module, alignment))

    with capture(subject.model, observe):
        after = run(subject, short.part(start, short.length, use_cache=True, **{taken: kept})).hidden
    before = alone[:, start:]
    how_far = moved(before, after, 1)
    found = leak(how_far, torch.ones_like(how_far, dtype=torch.bool), alone, start, evidence.thresholds)
    return None if found is None else Continuation(found, tuple(seen), _recurrent(subject.model, subject.config))


def _recurrent(model: nn.Module, config: Any) -> bool:
    """Whether some layers carry a state instead of keys: many of these continue one token at a time only."""
    kinds = [str(kind) for kind in getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()]
    linear = any(word in kind for kind in kinds for word in ("linear", "mamba", "conv", "recurrent", "hybrid"))
    return linear or any("mamba" in type(module).__name__.lower() for module in model.modules())


def _pad(subject: Subject, ids: Tensor, padding: Tensor | None) -> int:
    if padding is not None and padding.shape == ids.shape and not bool(padding.all()):
        return int(ids[~padding][0])
    return made_up.padding_id(subject.config)
