"""The two example models as files: which runs they are made of, and what is written of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from attemper import examples
from attemper.errors import ArgumentError, LoadError
from attemper.examples.decoder import CONTEXT, HEADS, HIDDEN, LAYERS, WIDTH, Decoder
from attemper.examples.figures import next_byte_loss
from attemper.examples.losses import as_rows, text_loss
from attemper.examples.provenance import Provenance
from attemper.examples.summary import summary
from attemper.examples.text import Corpus, load_corpus
from attemper.examples.weights import load, save
from attemper.files import write_whole
from attemper.lab.config import Model, Optimiser, RunConfig, Task
from attemper.lab.presets.arms import Arm, arm_of
from attemper.lab.presets.grouping import grouped
from attemper.lab.presets.preset import Effort
from attemper.lab.store.files import load_weights
from attemper.lab.store.results import RunResult
from attemper.lab.table import flat
from attemper.lab.training import threads

SCALED, UNSCALED = "scaled", "unscaled"
ARMS = (Arm(SCALED, {"model.rule": "inverse_sqrt"}), Arm(UNSCALED, {"model.rule": "none"}))
SCALES = {SCALED: (WIDTH // HEADS) ** -0.5, UNSCALED: 1.0}
FACTORIES = {SCALED: examples.scaled, UNSCALED: examples.unscaled}
SHIPPED = RunConfig(
    task=Task(name="text", length=CONTEXT),
    model=Model(layers=LAYERS, heads=HEADS, head_dim=WIDTH // HEADS, width=WIDTH, hidden=HIDDEN, attention="example"),
    optimiser=Optimiser(learning_rate=1e-3, warmup=100, decay="cosine", weight_decay=0.1, gradient_clip=1.0),
    steps=1600,
    batch=16,
    seed=2017,
    evaluate_every=100,
    log_every=20,
)
# What the record of a file says of its training; the rest is said once for both, in the words of PROVENANCE.md.
RECORDED = (
    "seed",
    "steps",
    "batch",
    "threads",
    "task.length",
    "optimiser.learning_rate",
    "optimiser.warmup",
    "optimiser.weight_decay",
)
_FREE = (*RECORDED, "evaluate_every", "log_every", "model.rule")
PROVENANCE = "PROVENANCE.md"


class Likeness(NamedTuple):
    """One file beside the one that comes with the package.

    Attributes:
        model: its name. seed: of the run. tensors: how many it holds, in float16. same: how many of them have every bit alike.
    """

    model: str
    seed: int
    tensors: int
    same: int


def check(configs: Sequence[RunConfig]) -> None:
    """Refuse runs that give no example model, or one of which its file would say something false.

    Raises:
        ArgumentError: a field is not what the example models have; the message names it. LoadError: a rule of neither.
    """
    wanted = flat(SHIPPED.model_dump(mode="json"))
    for config in configs:
        arm_of(ARMS, config)
        for name, value in flat(config.model_dump(mode="json")).items():
            if name not in _FREE and value != wanted[name]:
                raise ArgumentError(
                    name, repr(value), f"{wanted[name]!r}, as the example models have it; vary it in a TOML file, without files"
                )


def chosen(results: Sequence[RunResult]) -> dict[str, RunResult]:
    """The run that each file is made of, by its name: of the lowest seed with which all ended well; none without such a seed."""
    arms = grouped(results, lambda run: arm_of(ARMS, run.config))
    done = {name: {run.config.seed: run for run in runs if run.status == "done"} for name, runs in arms.items()}
    seeds = set.intersection(*(set(runs) for runs in done.values())) if done else set()
    return {arm.name: done[arm.name][min(seeds)] for arm in ARMS if arm.name in done} if seeds else {}


def likenesses(results: Sequence[RunResult], _effort: Effort) -> list[Likeness]:
    """How many tensors of each file are those that come with the package.

    Raises:
        LoadError: weights cannot be read.
    """
    rows = []
    for name, run in chosen(results).items():
        own, theirs = as_stored(name, run).state_dict(), FACTORIES[name]().state_dict()
        same = sum(own[each].half().view(torch.int16).equal(theirs[each].half().view(torch.int16)) for each in theirs)
        rows.append(Likeness(name, run.config.seed, len(own), same))
    return rows


def make(results: Sequence[RunResult], folder: Path) -> None:
    """Write NAME.safetensors of each model and PROVENANCE.md, as they come with the package.

    Args:
        results: the runs that ended. folder: where the files go.

    Raises:
        LoadError: weights cannot be read, or the runs learned from another Python's text. OSError: a file cannot be written.
    """
    runs = chosen(results)
    if not runs:
        return
    corpus = load_corpus()
    with threads(1):
        for name, run in runs.items():
            model = as_stored(name, run)
            save(model, folder / f"{name}.safetensors", _record(name, run, model, corpus))
        models = {name: load(folder / f"{name}.safetensors") for name in runs}
        write_whole(folder / PROVENANCE, summary(models, as_rows(corpus.validation)[:64]))


def as_stored(name: str, run: RunResult) -> Decoder:
    """The model that a run ended with, its weights rounded to float16 and widened again: all figures are of that.

    Args:
        name: "scaled" or "unscaled". run: of that arm.

    Raises:
        LoadError: the weights cannot be read.
    """
    model = Decoder(SCALES[name])
    load_weights(model, run)
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()
    return model.eval()


def command(config: RunConfig) -> str:
    """What trains this model again, whatever the sweep was that it came from."""
    given, usual = (flat(each.model_dump(mode="json")) for each in (config, SHIPPED))
    settings = [f"--set {name}={given[name]}" for name in RECORDED if given[name] != usual[name]]
    return " ".join(["attemper lab run examples --out DIR", *settings])


def _record(name: str, run: RunResult, model: Decoder, corpus: Corpus) -> Provenance:
    if corpus.sha256 not in run.data:
        raise LoadError(
            f"{run.folder}: it learned from {run.data}, and this Python's help topics have sha256 {corpus.sha256}; "
            "expected the Python that trained it; run `attemper lab report` with that"
        )
    config = run.config
    assert config.optimiser.gradient_clip is not None
    return Provenance(
        script="attemper/lab/presets/examples.py",
        command=command(config),
        text="pydoc_data.topics, repeated paragraphs removed",
        text_sha256=corpus.sha256,
        python=run.versions["python"],
        torch=run.versions["torch"],
        machine=run.machine,
        scale=model.scale,
        seed=config.seed,
        steps=config.steps,
        batch=config.batch,
        context=config.task.length,
        learning_rate=config.optimiser.learning_rate,
        warmup=config.optimiser.warmup,
        weight_decay=config.optimiser.weight_decay,
        gradient_clip=config.optimiser.gradient_clip,
        train_loss=text_loss(model, corpus.train[: len(corpus.validation)]),
        validation_loss=text_loss(model, corpus.validation),
        passage_loss=next_byte_loss(model, model.example_inputs()["input_ids"]).item(),
    )
