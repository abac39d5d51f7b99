"""`fix`: check, edit, write, read again, check again, compare."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from attemper.checker.evidence import Evidence
from attemper.checker.folder import Checkpoint, open_checkpoint, path_of
from attemper.checker.inputs import Inputs, prepare
from attemper.checker.load import Subject, load, names_factory
from attemper.checker.measure import dtype_name, measure
from attemper.checker.options import Options, Progress, one_line, untold
from attemper.checker.remedies import edits
from attemper.checker.remedies.comparing import compare, outputs
from attemper.checker.remedies.proposals import proposals
from attemper.checker.remedies.records import FixReport, Picks
from attemper.checker.remedies.writing import appearing, changed, check_out, write
from attemper.checker.run import judge
from attemper.checker.selection import Selection
from attemper.errors import ArgumentError, LoadError
from attemper.report import Report


def fix(
    model: "str | os.PathLike[str]",
    out: "str | os.PathLike[str] | None" = None,
    inputs: Any = None,
    *,
    clip: float | None = None,
    fold: tuple[str, str] | None = None,
    dry_run: bool = False,
    dtype: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    max_tokens: int = 2048,
    progress: Progress | None = None,
) -> FixReport:
    """Check a checkpoint, do the remedies that were picked to a copy, and check that.

    Args:
        model: a Hugging Face folder or a Hub id; it is never written to. Or "package.module:factory", of which nothing can be
            written: with dry_run, or without a pick.
        out: the new folder, absent or empty; needed unless nothing is picked or dry_run is set. It appears when it is complete,
            and not at all where anything fails.
        inputs, dtype, allow_pickle, trust_remote_code, max_tokens, progress: as in `attemper.check`, for both checks.
        clip: what no head's largest |scale · q·k| on these inputs should exceed, as in `attemper.weights.qk_clip_`.
        fold: (from, to): the scale rules of `attemper.weights.fold_scale`, each a number or "none", "inverse-sqrt", "inverse".
        dry_run: say what would be done, and write nothing.

    Returns:
        What check proposes, what was done, both checks, and how far the outputs moved. Without a pick: the proposals alone.

    Raises:
        ArgumentError: an argument cannot be used, or a factory's model would have to be written. UnsupportedError: the layout
            of the projections is not known, or the scale cannot be folded. LoadError: the model cannot be read or run.
        MissingExtraError: an optional package is needed.
    """
    picks, options = (
        Picks(clip, fold),
        Options(dtype=dtype, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code, max_tokens=max_tokens),
    )
    for text in fold or ():
        edits.rule(text)
    tell = progress or untold
    try:
        return _fix(model, None if out is None else path_of(os.fspath(out)), inputs, picks, options, dry_run, tell)
    except OSError as error:
        raise LoadError(f"a file could not be read or written: {one_line(error)}") from error


def _unwritable(model: "str | os.PathLike[str]") -> ArgumentError:
    return ArgumentError(
        "model",
        str(model),
        "a folder or a Hub id: what a factory builds has no checkpoint to write; look with --dry-run, and "
        "use attemper.weights on it",
    )


def _fix(
    model: "str | os.PathLike[str]",
    out: Path | None,
    inputs: Any,
    picks: Picks,
    options: Options,
    dry_run: bool,
    tell: Progress,
) -> FixReport:
    writes = picks.any and not dry_run
    if writes and names_factory(model):
        raise _unwritable(model)
    if writes and out is None:
        raise ArgumentError("out", None, "a new folder to write to, since nothing is done in place")
    local = path_of(os.fspath(model))
    if out is not None:
        check_out(out, local if local.is_dir() else out / "model")
    tell("loading the model")
    subject = load(model, options)
    if out is not None and subject.folder is not None:
        check_out(out, subject.folder)
    arguments, evidence, before = _check(subject, inputs, options, tell)
    report = FixReport(subject.name, "", before, proposals(before), picks, writable=subject.folder is not None)
    if not picks.any:
        return report
    old_outputs = outputs(subject, arguments) if writes else None
    tell("editing the weights")
    editing = subject
    # Every 16-bit number is a float32, so that what is not edited keeps its bits.
    if subject.folder is not None and options.dtype not in (None, "float32"):
        editing = load(str(subject.folder), replace(options, dtype="float32"))
    checkpoint = None if subject.folder is None else open_checkpoint(subject.folder, allow_pickle=options.allow_pickle)
    done, old = edits.apply(
        picks,
        editing.model,
        evidence,
        before,
        _margin(dtype_name(subject.model) if checkpoint is None else _stored(checkpoint)),
        lambda: measure(editing, arguments, options.thresholds, tell)[0],
    )
    report = replace(report, clips=done.clips, settings=done.settings, notes=done.notes)
    new = {name: editing.model.get_parameter(name).detach().clone() for name in old}
    if checkpoint is None:
        with torch.no_grad():  # a factory may give out a module that others hold
            for name, value in old.items():
                editing.model.get_parameter(name).copy_(value)
        return replace(report, changed=changed(old, new, done.edits))
    if not writes or out is None:
        return replace(report, changed=write(checkpoint, None, old, new, done.edits, done.settings)[0])
    del evidence
    editing = subject = replace(subject, model=torch.nn.Identity())  # one model at a time is enough
    with appearing(out) as partial:
        tell("writing the checkpoint")
        tensors, left_out = write(checkpoint, partial, old, new, done.edits, done.settings)
        tell("reading it again")
        fixed = replace(load(str(partial), options), name=str(out))
        _, _, after = _check(fixed, inputs, options, tell)
        moved = compare(old_outputs, outputs(fixed, arguments)) if old_outputs is not None else None
    notes = list(done.notes)
    if checkpoint.pickled:
        notes.append("the weights were pickle and were written as safetensors")
    if left_out:
        notes.append(f"not copied, since they hold the weights as they were: {', '.join(left_out)}")
    return replace(report, out=str(out), after=after, changed=tensors, outputs=moved, notes=tuple(notes))


def _check(subject: Subject, given: Any, options: Options, tell: Progress) -> tuple[Inputs, Evidence, Report]:
    arguments = prepare(subject, given, options)
    evidence, unseen = measure(subject, arguments, options.thresholds, tell)
    return arguments, evidence, judge(subject, (arguments,), evidence, unseen, Selection())


def _stored(checkpoint: Checkpoint) -> str:
    """Name of the dtype that the configuration says the weights are stored in."""
    return str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")).removeprefix("torch.")


def _margin(stored: str) -> float:
    """How far under the threshold to clip: two roundings of a weight as it is stored, and those of a dot product in float32."""
    dtype = getattr(torch, stored, None)
    eps = torch.finfo(dtype).eps if isinstance(dtype, torch.dtype) and dtype.is_floating_point else 0.0
    return max(2 * eps, 1e-5)
