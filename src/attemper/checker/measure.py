"""Runs the model under capture, reduces every attention call on the spot, and runs it again for what needs a second look.

What it must hold: no q, k or weights outlive their call; the model is left as it was found (modes and hooks); a healthy model
is run once for its figures on each of the inputs, once more on the first, and once or twice for each probe that applies to it.
"""

import contextlib
import inspect
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from attemper.capture import AttentionCall, Unseen, capture
from attemper.checker import made_up, probes
from attemper.checker.evidence import CallEvidence, Evidence, Misread, NonFinite
from attemper.checker.finite import Activations, watch_activations
from attemper.checker.inputs import Inputs
from attemper.checker.invariance import agreement
from attemper.checker.load import Subject
from attemper.checker.options import Progress, one_line
from attemper.checker.outputs import Outputs, bodies, first_float, hidden_states, kept_cache
from attemper.checker.over_inputs import over_inputs
from attemper.checker.padding import Untried, nan_in_padding, padding_leak, padding_mask
from attemper.checker.reduce import Reduced, misread, read_back, reduce_call
from attemper.checker.repeat import apart_when_repeated
from attemper.checker.streaming import Away
from attemper.checker.thresholds import Thresholds
from attemper.errors import AttemperError, LoadError


def measure(
    subject: Subject, inputs: Inputs, thresholds: Thresholds, tell: Progress, others: Sequence[Inputs] = ()
) -> tuple[Evidence, tuple[Unseen, ...]]:
    """Run the model on the inputs.

    Args:
        others: more inputs, for the figures alone: probes change the first.

    Returns:
        What was measured, and what was not seen (on the first inputs).

    Raises:
        LoadError: the model cannot be run on these inputs.
    """
    model, config = subject.model, subject.config
    inputs = by_name(subject, inputs)
    with evaluating(model), torch.no_grad():
        looked = [
            _look(subject, each, thresholds, tell, f"{number} of {len(others) + 1}" if others else "")
            for number, each in enumerate((inputs, *others), 1)
        ]
        first = looked[0]
        by_input = tuple(each.calls for each in looked)
        evidence = Evidence(
            model=model,
            config=config,
            dtype=dtype_name(model),
            calls=over_inputs(by_input),
            nonfinite=next((found for each in looked if (found := each.nonfinite(subject)) is not None), None),
            largest_activation=max((each.activations.largest() for each in looked), key=lambda largest: largest[1]),
            causal_claim=probes.causal_claim(model, config, inputs, first.calls),
            nearly_causal=probes.nearly_causal(model, config, inputs, first.calls),
            thresholds=thresholds,
            by_input=by_input if others else (),
            misread=first.misread,
        )
        if evidence.nonfinite is None:
            tell(f"trying {subject.name} on changed inputs")
            evidence = _probed(subject, inputs, first, evidence)
    return evidence, first.unseen


def _probed(subject: Subject, inputs: Inputs, first: "_Look", evidence: Evidence) -> Evidence:
    """The evidence with what the probes say; of a model that disagrees with itself they could say nothing."""
    outputs, padding, made = first.outputs, first.padding, first.activations.first_nonfinite(subject.model)
    nan_reach = nan_in_padding(subject, inputs, outputs, made, padding, run)
    if words := apart_when_repeated(subject, inputs, outputs, evidence.thresholds, run):
        return replace(evidence, nan_reach=nan_reach, deterministic=False, untried=(words,))
    leaked = padding_leak(subject, inputs, outputs, evidence, padding, run)
    evidence = replace(
        evidence,
        future=probes.future(subject, inputs, outputs, evidence, padding, run),
        padding=None if isinstance(leaked, Untried) else leaked,
        nan_reach=nan_reach,
    )
    agreed = agreement(subject, inputs, evidence, padding, run)
    untried = (f"whether padding leaks was not tried: {leaked.words}",) if isinstance(leaked, Untried) else ()
    return replace(evidence, batching=agreed.batching, continuation=agreed.continuation, untried=(*untried, *agreed.untried))


@dataclass(frozen=True)
class _Look:
    """One run under capture."""

    inputs: Inputs
    padding: Tensor | None
    outputs: Outputs
    calls: tuple[CallEvidence, ...]
    activations: Activations
    unseen: tuple[Unseen, ...]
    misread: tuple[Misread, ...]

    def nonfinite(self, subject: Subject) -> NonFinite | None:
        return _nonfinite(subject, self.inputs, self.outputs, self.calls, self.activations, self.padding)


def _look(subject: Subject, inputs: Inputs, thresholds: Thresholds, tell: Progress, which: str) -> _Look:
    model, config = subject.model, subject.config
    padding = padding_mask(inputs)
    reduced: list[Reduced] = []
    empty: dict[str, None] = {}
    running, layers = f"running {subject.name}" + (f" on inputs {which}" if which else ""), _layers(model)
    tell(running, 0, layers)

    decodes = getattr(config, "is_encoder_decoder", False)

    def observe(call: AttentionCall) -> None:
        # The mask of an encoder-decoder's inputs is about the encoder's tokens: also its decoder may have as many of its own.
        tell(running, len(reduced), layers)
        if not call.query.shape[-2]:  # not a row to look at
            empty[call.module] = None
            return
        other = decodes and call.self_attention and probes.in_causal_part(model, config, call.module)
        reduced.append(reduce_call(call, None if other else padding, thresholds))

    with (
        capture(model, observe, follow_projections=True) as seen,
        watch_activations(model, inside_fused=False) as activations,
    ):
        outputs = run(subject, inputs)
    calls = tuple(
        read_back(each, in_causal_part=probes.in_causal_part(model, config, each.place["module"]))
        for each in reduced
        if each.holds
    )
    misreads = tuple(found for each in reduced if (found := misread(each)))
    unseen = (
        *seen.unseen(),
        *(Unseen(module, "a call of it has no queries, so that there is nothing to see") for module in empty),
    )
    return _Look(inputs, padding, outputs, calls, activations, unseen, misreads)


def _layers(model: nn.Module) -> int:
    """How many attention calls to expect, for a progress bar: the entries of the outermost lists of layers; 0: not known."""
    if isinstance(model, nn.ModuleList):
        return len(model)
    return sum(_layers(child) for child in model.children())


def by_name(subject: Subject, inputs: Inputs) -> Inputs:
    """The inputs with token ids and their mask by name, also where they were given by position: probes look for the names."""
    accepted = inspect.signature(subject.model.forward).parameters.values()
    places = [each.name for each in accepted if each.kind is each.POSITIONAL_OR_KEYWORD][: len(inputs.args)]
    if not {"input_ids", "attention_mask"} & set(places) or len(places) < len(inputs.args):
        return inputs
    return replace(inputs, args=(), kwargs={**dict(zip(places, inputs.args, strict=True)), **inputs.kwargs})


def run(subject: Subject, inputs: Inputs) -> Outputs:
    """One forward pass, without caches, and with only the last position of a language model's head.

    Raises:
        LoadError: the model raised.
    """
    kwargs = dict(inputs.kwargs)
    if subject.config is not None:
        accepted = made_up.parameters(subject.model)
        # Hidden states come from below the head, which for a large vocabulary would cost more than all layers together.
        extra = {"use_cache": False} | ({"logits_to_keep": 1} if bodies(subject.model) else {})
        kwargs |= {name: value for name, value in extra.items() if name in accepted and name not in kwargs}
    try:
        with hidden_states(subject.model) as inner:
            returned = subject.model(*inputs.args, **kwargs)
    except AttemperError:
        raise
    except (Exception, SystemExit) as error:
        away = any(isinstance(parameter, Away) for parameter in subject.model.parameters())
        hint = "; its weights are read block by block, which may be why: try it without --max-memory" if away else ""
        raise LoadError(f"{subject.name} could not be run on {inputs.description}: {one_line(error)}{hint}") from error
    final = first_float(returned)
    # Asked for only where there should be one: transformers warns whoever reads the older name, on every model.
    cache = kept_cache(returned) if kwargs.get("use_cache") else None
    return Outputs(final, inner.value if inner.value is not None else final, cache)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Evaluation mode for the time being; every submodule gets its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def dtype_name(model: nn.Module) -> str:
    """The dtype of most of the model's floating-point parameters, such as "float32"."""
    counts: dict[Any, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return str(max(counts, key=lambda dtype: counts[dtype]) if counts else torch.get_default_dtype()).removeprefix("torch.")


def _nonfinite(
    subject: Subject,
    inputs: Inputs,
    outputs: Outputs,
    calls: tuple[CallEvidence, ...],
    activations: Activations,
    padding: Tensor | None,
) -> NonFinite | None:
    """Where the first NaN or infinity arose, if it reached an output of a real token or the logits of attention."""
    reached = any(int(call.stats.nonfinite_rows.sum()) for call in calls)
    if not (reached or _broken(outputs.hidden, padding) or _broken(outputs.final, padding)):
        return None
    with watch_activations(subject.model, inside_fused=True) as everywhere:
        run(subject, inputs)
    found = everywhere.first_nonfinite(subject.model) or activations.first_nonfinite(subject.model)
    return found or NonFinite("", "", "NaN or infinity", "", 0.0)


def _broken(output: Tensor | None, padding: Tensor | None) -> bool:
    """NaN or +inf for a real token. −inf alone is not held against an output: models write it for choices that are ruled out."""
    if output is None:
        return False
    bad = torch.isnan(output) | (output == torch.inf)
    if padding is not None and output.dim() == 3 and output.shape[0] == padding.shape[0]:
        kept = padding[:, -output.shape[1] :]  # the head may give the last positions only
        if kept.shape == output.shape[:2]:
            bad = bad & kept.unsqueeze(-1)
    return bool(bad.any())
