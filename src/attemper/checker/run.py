"""`check`: load, measure, judge, report."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from attemper.capture import Unseen
from attemper.checker.backend import backend_findings
from attemper.checker.budget import size
from attemper.checker.evidence import CallEvidence, Evidence
from attemper.checker.health import health_findings
from attemper.checker.inputs import Inputs, prepare_all
from attemper.checker.inputs_in_words import in_words
from attemper.checker.load import Subject, load
from attemper.checker.masks import mask_findings
from attemper.checker.measure import dtype_name, measure
from attemper.checker.narrow import narrow_findings
from attemper.checker.numeric_range import range_findings
from attemper.checker.options import Options, Progress, one_line, untold
from attemper.checker.orders import own_order
from attemper.checker.padding import embedding
from attemper.checker.scale import effective, learned_notes, position_notes, scale_findings
from attemper.checker.selection import Codes, Selection
from attemper.checker.thresholds import THRESHOLDS, Thresholds
from attemper.checker.weights_only import weigh
from attemper.errors import ArgumentError, LoadError
from attemper.report import Finding, LayerRow, Report

_RULES: tuple[Callable[[Evidence], Iterable[Finding]], ...] = (
    scale_findings,
    backend_findings,
    range_findings,
    narrow_findings,
    health_findings,
    mask_findings,
)


def check(
    model: "str | os.PathLike[str] | nn.Module | None" = None,
    inputs: Any = None,
    *,
    select: Codes | None = None,
    ignore: Codes | None = None,
    per_layer_ignores: Mapping[str, Codes] | None = None,
    severities: Mapping[str, str] | None = None,
    thresholds: Mapping[str, float] | Thresholds | None = None,
    dtype: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    max_tokens: int = 2048,
    max_memory: int | str | None = None,
    passages: int = 1,
    weights_only: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Run a model once, look at every attention call in it, and report what is wrong.

    Args:
        model: a module, a path, or what the command takes: a Hugging Face folder, a Hub id, or "package.module:factory" (called
            without arguments); None: the unscaled example that attemper brings along.
        inputs: a dict of tensors by parameter name, a tensor or a tuple of tensors, or what the command takes: a text file, a
            safetensors file of named tensors, or "module:function"; or a list of dicts or of such names, each run by itself.
            None: a built-in passage through the model's tokenizer, the model's own `example_inputs()`, or made-up inputs; the
            report says which.
        select, ignore: codes or beginnings of codes, in a list or with commas; the longest that fits decides.
        per_layer_ignores: codes by globs of whole module names: {"*.layers.0.*": "ATT301"}.
        severities: how grave findings are held to be, by codes: {"ATT302": "warning"}.
        thresholds: numbers by name, such as {"large-logit": 50}; those not named keep their defaults.
        dtype: "float32", "float16", "bfloat16" or "auto" (the checkpoint's); None: float32 for checkpoints, modules as they are.
        allow_pickle: read pickled weights, with weights_only=True. trust_remote_code: run code that a checkpoint brings along.
        max_tokens: texts are cut to this length, and to what the model can take.
        max_memory: bytes, or text such as "16GB", that the process may take: a checkpoint in safetensors that is larger is read
            from disk block by block while it runs, with the same figures.
        passages: cut texts into this many passages, each an input of its own: figures are over all, and findings about the
            softmax say on how many they hold.
        weights_only: make no forward pass; bound the logits by the projections' spectral norms, and compare these norms.
        progress: called as progress(words, done, total) before each long step, and while the model runs.

    Returns:
        The report; `str(report)` is what the command prints, `report.exit_code()` what it returns.

    Raises:
        ArgumentError: an argument that cannot be used, such as an unknown code.
        LoadError: the model or the inputs cannot be read or run.
        MissingExtraError: an optional package is needed.
    """
    options = Options(
        dtype=dtype,
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
        max_tokens=max_tokens,
        thresholds=Thresholds.of(thresholds),
        max_memory=None if max_memory is None else size(max_memory),
        passages=passages,
    )
    selection = Selection.of(select, ignore, per_layer_ignores, severities)
    tell = progress or untold
    try:
        tell("loading the model")
        subject = load(model, options)
        if weights_only:
            return _by_weights(subject, inputs, passages, selection, options, tell)
        tell("preparing inputs")
        arguments, *others = prepare_all(subject, inputs, options)
    except OSError as error:
        raise LoadError(f"a file could not be read: {one_line(error)}") from error
    evidence, unseen = measure(subject, arguments, options.thresholds, tell, others)
    return judge(subject, (arguments, *others), evidence, unseen, selection)


def judge(
    subject: Subject, inputs: Sequence[Inputs], evidence: Evidence, unseen: tuple[Unseen, ...], selection: Selection
) -> Report:
    """The report on what was measured, with the findings that are selected.

    Raises:
        LoadError: attention ran on random weights, so that there is nothing to judge.
    """
    _refuse_random_attention(subject, evidence)
    findings = selection.apply(finding for rules in _RULES for finding in rules(evidence))
    return Report(
        model=subject.name,
        inputs=in_words(inputs),
        dtype=evidence.dtype,
        rows=tuple(_row(evidence, call) for call in evidence.calls),
        findings=findings,
        unseen=tuple((each.module, each.reason) for each in unseen),
        notes=(
            *subject.notes,
            *dict.fromkeys(note for each in inputs for note in each.notes),
            *_notes(evidence),
            *_unusual(selection, evidence.thresholds, subject),
        ),
    )


def _row(evidence: Evidence, call: CallEvidence) -> LayerRow:
    scales = effective(evidence.model, evidence.config, call)
    own = own_order(call.written, evidence.dtype) if call.orders else ""
    return LayerRow(
        call.module,
        call.call,
        call.seam,
        call.stats,
        None if scales is None else scales.single,
        scales,
        own_order=own,
        orders=call.orders,
    )


def _by_weights(subject: Subject, inputs: Any, passages: int, selection: Selection, options: Options, tell: Progress) -> Report:
    if inputs is not None or passages != 1:
        raise ArgumentError("weights_only", "inputs or passages as well", "neither: without a forward pass nothing takes them")
    tell(f"reading the projections of {subject.name}")
    weighed = weigh(subject, options.thresholds)
    return Report(
        model=subject.name,
        inputs="none: the weights alone",
        dtype=dtype_name(subject.model),
        rows=(),
        findings=selection.apply(weighed.findings),
        unseen=weighed.unseen,
        notes=(*subject.notes, *_unusual(selection, options.thresholds, subject)),
        weights=weighed.rows,
    )


def _refuse_random_attention(subject: Subject, evidence: Evidence) -> None:
    modules = {call.module for call in evidence.calls}
    embeds = embedding(subject.model)
    modules |= {name for name, module in subject.model.named_modules() if module is embeds}
    random = sorted(name for name in subject.missing if any(name.startswith(module + ".") for module in modules))
    if random:
        raise LoadError(
            f"{subject.name} lacks weights of attention or of the embedding ({len(random)} parameters, such as {random[0]}): "
            "they would be random and every figure meaningless; does config.json belong to these weights?"
        )


def _unusual(selection: Selection, thresholds: Thresholds, subject: Subject) -> list[str]:
    """What a reader should know of the settings: ignores without effect, thresholds that are not the usual ones."""
    globs = selection.fits_nothing(name for name, _ in subject.model.named_modules())
    notes = [f"the per-layer ignore {glob!r} fits no module of this model" for glob in globs]
    values = thresholds.by_name()
    changed = [
        f"{each.name} {values[each.name]:g} (usually {each.default:g})"
        for each in THRESHOLDS
        if values[each.name] != each.default
    ]
    return [*notes, f"thresholds were set: {', '.join(changed)}"] if changed else notes


def _notes(evidence: Evidence) -> list[str]:
    notes = [*learned_notes(evidence), *position_notes(evidence)]
    by_position = [call.module for call in evidence.calls if isinstance(call.scale, Tensor) and call.scale.dim() > 1]
    if by_position:
        notes.append(f"the scale differs by position in {len(by_position)} calls, such as {by_position[0]}")
    if evidence.nearly_causal or not evidence.deterministic:
        return [*notes, *evidence.untried]
    if not evidence.causal_claim and evidence.calls:
        notes.append("nothing says that it is causal, so whether it sees the future was not tried")
    elif evidence.causal_claim and evidence.future is None and evidence.nonfinite is None:
        notes.append("whether it sees the future could not be tried on these inputs")
    return [*notes, *evidence.untried]
