"""The preset that trains the example models again: bit for bit what a plain loop gives, and what it writes of it."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attemper import examples
from attemper.errors import ArgumentError, LoadError
from attemper.examples.decoder import Decoder
from attemper.examples.figures import next_byte_loss
from attemper.examples.losses import text_loss
from attemper.examples.text import Corpus, split
from attemper.examples.weights import load
from attemper.lab import sweep as sweeps
from attemper.lab.config import Optimiser, RunConfig
from attemper.lab.presets import preset
from attemper.lab.presets.rebuilding import PROVENANCE, SCALES, SHIPPED, Likeness, check, chosen, command, likenesses, make
from attemper.lab.store.files import load_weights
from attemper.lab.store.results import RunResult
from attemper.lab.sweep import Sweep
from attemper.lab.training import threads, train
from attemper.lab.viewing import view_of
from tests.lab_runs import made_up
from tests.running import ROOT

CORPUS = split([f"Paragraph {number} counts {number * number} things, and then it ends." for number in range(600)])


@pytest.fixture(scope="module", autouse=True)
def corpus() -> Iterator[Corpus]:
    """A text whose losses are measured in a moment, in the place of the help topics."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("tasks.text", "presets.rebuilding"):
            patch.setattr(f"attemper.lab.{module}.load_corpus", lambda: CORPUS)
        yield CORPUS


def short(rule: str = "inverse_sqrt", seed: int = 2017, **fields: Any) -> RunConfig:
    """Of a second; evaluated and logged in the middle."""
    given = {"steps": 5, "batch": 3, "evaluate_every": 2, "log_every": 2, "optimiser": Optimiser(learning_rate=1e-3, warmup=2)}
    model = SHIPPED.model.model_copy(update={"rule": rule})
    return SHIPPED.model_copy(update=given | {"model": model, "seed": seed} | fields)


@threads(1)
def plain_loop(scale: float, config: RunConfig) -> dict[str, Tensor]:
    """The training of the shipped models, written out: what the lab does besides must not change a bit of it."""
    torch.manual_seed(config.seed)
    model, order = Decoder(scale), torch.Generator().manual_seed(config.seed)
    text = torch.tensor(list(CORPUS.train))
    window = torch.arange(config.task.length + 1)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    warmup, steps = config.optimiser.warmup, config.steps
    for step in range(steps):
        cosine = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))
        optimizer.param_groups[0]["lr"] = 1e-3 * ((step + 1) / warmup if step < warmup else cosine)
        starts = torch.randint(len(text) - config.task.length, (config.batch, 1), generator=order)
        loss = next_byte_loss(model, text[starts + window])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(("rule", "scale"), [("inverse_sqrt", 0.125), ("none", 1.0)])
def test_the_lab_trains_what_a_plain_loop_trains_bit_for_bit(rule: str, scale: float, tmp_path: Path) -> None:
    config = short(rule)
    run = replace(train(config, tmp_path), folder=next(tmp_path.glob("runs/*")))
    assert [each.at for each in run.evaluations] == [2, 4, 5]
    assert run.curves.figures["saturated_share"].isfinite().all(), "the watch saw nothing"
    assert run.curves.figures["saturated_share"].shape == (3, 4, 2)
    model = Decoder(scale)
    load_weights(model, run)
    wanted = plain_loop(scale, config)
    assert [name for name, weights in model.state_dict().items() if not torch.equal(weights, wanted[name])] == []


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> Path:
    folder = tmp_path_factory.mktemp("examples") / "sweep"
    runs = tuple(short(rule, seed, steps=3) for rule in ("none", "inverse_sqrt") for seed in (2018, 2017))
    sweeps.begin(folder, Sweep("examples", "changed", "a command", runs))
    sweeps.run(folder)
    return folder


@pytest.mark.parametrize("name", ["scaled", "unscaled"])
def test_the_files_are_the_models_of_the_lowest_seed(sweep: Path, name: str) -> None:
    view_of(sweep)
    model = load(sweep / f"{name}.safetensors")
    record = model.provenance
    assert record is not None
    wanted = plain_loop(SCALES[name], short(steps=3))
    assert all(torch.equal(weights, wanted[each].half().float()) for each, weights in model.state_dict().items())
    assert (record.seed, record.steps, record.batch, record.scale) == (2017, 3, 3, SCALES[name])
    assert record.command == "attemper lab run examples --out DIR --set steps=3 --set batch=3 --set optimiser.warmup=2"
    assert record.machine.endswith("one thread")
    assert record.text_sha256 == CORPUS.sha256
    assert record.validation_loss == pytest.approx(text_loss(model, CORPUS.validation), abs=1e-6)
    assert f"| {name} | {record.scale:g} | {record.train_loss:.4f} |" in (sweep / PROVENANCE).read_text("utf-8")


def test_the_answer_counts_the_tensors_that_are_the_package_s(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (table,) = [table for table in view_of(sweep).answer.tables if table.title == "The models as files"]
    assert table.rows == (("scaled.safetensors", "2017", "43", "0"), ("unscaled.safetensors", "2017", "43", "0"))
    made = {name: (lambda name=name: load(sweep / f"{name}.safetensors")) for name in SCALES}
    monkeypatch.setattr("attemper.lab.presets.rebuilding.FACTORIES", made)
    assert likenesses(sweeps.results(sweep), "quick") == [Likeness(name, 2017, 43, 43) for name in ("scaled", "unscaled")]


def test_files_that_are_there_are_not_made_again(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view_of(sweep)
    (sweep / "scaled.safetensors").unlink()
    view_of(sweep)
    assert not (sweep / "scaled.safetensors").exists()
    (sweep / PROVENANCE).unlink()  # the last to be written: without it they are not whole
    view_of(sweep)
    assert (sweep / "scaled.safetensors").exists()


def test_another_python_does_not_sign_for_the_text(sweep: Path, tmp_path: Path) -> None:
    strange = [replace(run, data="help topics of Python 3.99.0, sha256 0", folder=run.folder) for run in sweeps.results(sweep)]
    with pytest.raises(LoadError, match=r"learned from help topics of Python 3\.99\.0.*expected the Python that trained it"):
        make(strange, tmp_path)
    answer = preset("examples").answer(strange, [])
    assert "these from help topics of Python 3.99.0, sha256 0." in answer.limits[-1]


def test_a_folder_that_cannot_be_written_is_said(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sweep / PROVENANCE).unlink(missing_ok=True)
    (sweep / "scaled.safetensors").unlink(missing_ok=True)
    (sweep / "scaled.safetensors").mkdir()
    try:
        with pytest.raises(ArgumentError, match=r"out: got .*sweep \(Is a directory\)"):
            view_of(sweep)
    finally:
        (sweep / "scaled.safetensors").rmdir()


def results(*losses: tuple[str, int, float]) -> list[RunResult]:
    return [made_up(short(rule, seed), loss) for rule, seed, loss in losses]


def test_files_are_of_one_seed_with_which_both_ended() -> None:
    lost = math.nan
    found = results(("inverse_sqrt", 4, 2.0), ("inverse_sqrt", 5, 2.0), ("none", 4, lost), ("none", 5, 2.0))
    assert {name: run.config.seed for name, run in chosen(found).items()} == {"scaled": 5, "unscaled": 5}
    assert chosen(results(("inverse_sqrt", 4, 2.0), ("none", 4, lost))) == {}
    assert list(chosen(results(("none", 4, 2.0)))) == ["unscaled"]


def test_no_file_is_made_of_trainings_that_diverged(tmp_path: Path) -> None:
    make(results(("inverse_sqrt", 4, math.nan), ("none", 4, 2.0)), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (short(model=SHIPPED.model.model_copy(update={"layers": 3})), r"model\.layers: got 3; expected 4, as the example"),
        (short(model=SHIPPED.model.model_copy(update={"attention": "dot"})), r"model\.attention: got 'dot'; expected 'example'"),
        (short(optimiser=Optimiser(gradient_clip=None)), r"optimiser\.gradient_clip: got None; expected 1\.0"),
        (short(rule="mup"), r"model\.rule = 'mup': expected that of one of scaled, unscaled"),
    ],
)
def test_runs_that_give_no_example_are_refused(config: RunConfig, said: str) -> None:
    check([short(), short("none")])
    with pytest.raises((ArgumentError, LoadError), match=said):
        check([short(), config])


def test_the_shipped_files_say_the_preset_s_recipe() -> None:
    assert [run for run in preset("examples").runs("full") if run.seed == 2017] == [
        SHIPPED,
        SHIPPED.model_copy(update={"model": SHIPPED.model.model_copy(update={"rule": "none"})}),
    ]
    for model in (examples.scaled(), examples.unscaled()):
        record = model.provenance
        assert record is not None
        assert record.command == command(SHIPPED) == "attemper lab run examples --out DIR"
        assert (ROOT / "src" / record.script).is_file()
        dials = SHIPPED.optimiser
        assert (record.seed, record.steps, record.batch, record.context) == (2017, 1600, 16, SHIPPED.task.length)
        assert (record.learning_rate, record.warmup, record.weight_decay) == (dials.learning_rate, dials.warmup, 0.1)
        assert record.gradient_clip == dials.gradient_clip
