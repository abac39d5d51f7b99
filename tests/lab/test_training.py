import json
import math
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import parquet

import attemper
from attemper.errors import ArgumentError, LoadError
from attemper.lab import training
from attemper.lab.identity import run_id
from attemper.lab.models import attention_layers, build
from attemper.lab.store.files import RunFiles
from attemper.lab.tasks import load_task
from attemper.lab.training import train
from attemper.monitor.trackers.locking import Lock
from tests.lab_runs import MODEL, TASK, After, Model, Optimiser, Precision, files_of, own_text, tiny


class StoppedError(Exception):
    pass


def stop_after(steps: int):
    def progress(step: int, _loss: float) -> None:
        if step == steps:
            raise StoppedError(step)

    return progress


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"optimiser": Optimiser(name="muon")},
        {"optimiser": Optimiser(name="sgd", learning_rate=0.1)},
        {"precision": Precision(arithmetic="fp16", loss_scale="dynamic")},
        {"optimiser": Optimiser(qk_clip=3.0)},
        {"model": Model(layers=2, heads=3, head_dim=6, width=10, rule="learned", init="mup")},
        {"model": Model(layers=2, heads=3, head_dim=6, width=18, attention="example"), "optimiser": Optimiser(qk_clip=0.3)},
    ],
    ids=["adamw", "muon", "sgd", "fp16", "clip", "mup", "example"],
)
def test_an_interrupted_run_goes_on_to_the_same_bytes(
    fields: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "SAVE_EVERY", 0.0)
    config = tiny(**fields)
    train(config, tmp_path / "whole")
    for stop in (3, 7, 10):
        with pytest.raises(StoppedError, match=f"^{stop}$"):
            train(config, tmp_path / "parts", stop_after(stop))
        assert (tmp_path / "parts" / "runs" / run_id(config) / "checkpoint.safetensors").exists()
    train(config, tmp_path / "parts")
    assert files_of(tmp_path / "whole") == files_of(tmp_path / "parts")
    results = [json.loads(path.read_text()) for path in tmp_path.rglob("result.json")]
    assert results[0]["evaluations"] == results[1]["evaluations"]
    assert not list(tmp_path.rglob("checkpoint.safetensors"))


def test_what_is_recorded_is_what_a_plain_loop_gives(tmp_path: Path) -> None:
    config = tiny(optimiser=Optimiser(gradient_clip=None, weight_decay=0.0, decay="none", warmup=0))
    result = train(config, tmp_path)
    task = load_task(config.task)
    torch.manual_seed(config.seed)
    model = build(config, task)
    order = torch.Generator().manual_seed(config.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optimiser.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    losses, into, entropies = [], [], []
    for step in range(config.steps):
        batch = task.batch(config.batch, order)
        with attemper.watch(model) as watching:
            loss = torch.nn.functional.cross_entropy(model(**batch.inputs).flatten(0, 1), batch.targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            record = watching.step()
        assert record is not None
        if step % config.log_every == 0:
            layers = attention_layers(model).values()
            into.append([torch.linalg.vector_norm(layer.q_proj.weight.grad.double()).item() for layer in layers])
            entropies.append(torch.stack([layer.figure("normalized_entropy") for layer in record.layers]))
        optimizer.step()
        losses.append(loss.item())
    curves = result.curves
    assert curves.loss.tolist() == losses
    assert curves.steps.tolist() == list(range(0, config.steps, config.log_every))
    torch.testing.assert_close(curves.q_gradient, torch.tensor(into, dtype=torch.float64), rtol=0, atol=0)
    torch.testing.assert_close(curves.figures["normalized_entropy"], torch.stack(entropies).double(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("widths", [(4, 8, 4), (4, 4, 8), (8, 4, 2), (4, 8, 4, 8)])
def test_heads_of_unequal_widths_are_recorded_each_in_its_place(widths: tuple[int, ...], tmp_path: Path) -> None:
    model = Model(layers=2, heads=len(widths), head_dim=widths, width=10, position="none")
    config = tiny(model=model, steps=1)
    found = train(config, tmp_path).curves.figures["max_scaled_product"][0]
    torch.manual_seed(config.seed)
    task = load_task(config.task)
    made = build(config, task)
    seen: list[torch.Tensor] = []
    for layer in attention_layers(made).values():
        layer.register_forward_hook(lambda _layer, inputs, _output: seen.append(inputs[0]))
    made(**task.batch(config.batch, torch.Generator().manual_seed(config.seed)).inputs)
    for place, (layer, x) in enumerate(zip(attention_layers(made).values(), seen, strict=True)):
        pairs = zip(layer.q_proj(x).split(widths, -1), layer.k_proj(x).split(widths, -1), strict=True)
        largest = [(q @ k.mT).tril().abs().max().item() / q.shape[-1] ** 0.5 for q, k in pairs]
        assert found[place].tolist() == pytest.approx(largest, rel=1e-5)


def test_a_run_that_is_over_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny()
    first = train(config, tmp_path)
    monkeypatch.setattr(training.Trial, "__init__", lambda *_: pytest.fail("trained again"))
    again = train(config, tmp_path)
    assert (again.loss, again.evaluations, again.ended) == (first.loss, first.evaluations, config.steps - 1)


def test_evaluations_come_at_their_steps_and_after(tmp_path: Path) -> None:
    config = tiny(after=After(logit_factors=(1.0, 4.0), lengths=(13, 29)))
    result = train(config, tmp_path)
    assert [(each.kind, each.at) for each in result.evaluations] == [
        ("validation", 4), ("validation", 8), ("validation", 11),
        ("logit_factor", 1.0), ("logit_factor", 4.0), ("length", 13), ("length", 29),
    ]  # fmt: skip
    last, same, sharper, usual, _ = (each.loss for each in result.evaluations[2:])
    assert last == same == usual
    assert sharper != last


def test_a_loss_that_is_no_number_ends_the_run_as_a_result(tmp_path: Path) -> None:
    config = tiny(optimiser=Optimiser(name="sgd", learning_rate=1e30, warmup=0, gradient_clip=None))
    result = train(config, tmp_path)
    assert result.status == "diverged"
    assert math.isnan(result.loss)
    assert result.ended < config.steps - 1
    table = parquet.read_table(tmp_path / "runs" / result.id / "steps.parquet")
    assert table.num_rows == result.ended + 1
    assert not math.isfinite(table.column("loss").to_pylist()[-1])
    again = train(config, tmp_path)
    assert (again.status, again.ended) == ("diverged", result.ended)
    assert again.curves.loss.shape == (result.ended + 1,)


def test_weights_that_the_last_step_ruins_are_a_result_too(tmp_path: Path) -> None:
    config = tiny(
        optimiser=Optimiser(name="sgd", learning_rate=1e30, warmup=0, gradient_clip=None), steps=1, after=After(lengths=(17,))
    )
    result = train(config, tmp_path)
    assert (result.status, result.ended) == ("diverged", 0)
    assert [each.kind for each in result.evaluations] == ["validation"]
    assert not math.isfinite(result.evaluations[0].loss)


def test_a_run_does_not_go_on_with_other_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "SAVE_EVERY", 0.0)
    text = tmp_path / "own.txt"
    text.write_text(own_text("some words"))
    config = tiny(task=TASK.model_copy(update={"path": str(text)}))
    with pytest.raises(StoppedError, match=r"^5$"):
        train(config, tmp_path / "sweep", stop_after(5))
    text.write_text(own_text("other words"))
    with pytest.raises(LoadError, match=r"trained on .*own\.txt, sha256 .*, and now there is .*own\.txt, sha256"):
        train(config, tmp_path / "sweep")
    text.write_text(own_text("some words"))
    assert train(config, tmp_path / "sweep").status == "done"


def test_what_another_process_ended_meanwhile_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny()
    first = train(config, tmp_path)
    found = iter([None, RunFiles(tmp_path, run_id(config)).result()])  # not over, and over once it has the lock
    monkeypatch.setattr(RunFiles, "result", lambda _self: next(found))
    monkeypatch.setattr(training.Trial, "__init__", lambda *_: pytest.fail("trained again"))
    assert train(config, tmp_path).seconds == first.seconds


def test_a_disk_that_is_full_keeps_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "SAVE_EVERY", 0.0)
    config = tiny()
    train(config, tmp_path / "whole")
    with pytest.raises(StoppedError, match=r"^6$"):
        train(config, tmp_path / "parts", stop_after(6))
    kept = RunFiles(tmp_path / "parts", run_id(config)).checkpoint.read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)  # Python has SIGXFSZ ignored
    resource.setrlimit(resource.RLIMIT_FSIZE, (4099, limit[1]))
    try:
        with pytest.raises(OSError, match=r"checkpoint\.safetensors"):
            train(config, tmp_path / "parts")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert RunFiles(tmp_path / "parts", run_id(config)).checkpoint.read_bytes() == kept
    train(config, tmp_path / "parts")
    assert files_of(tmp_path / "whole") == files_of(tmp_path / "parts")


def test_another_process_is_refused(tmp_path: Path) -> None:
    config = tiny()
    folder = tmp_path / "runs" / run_id(config)
    folder.mkdir(parents=True)
    lock = Lock("out", folder)
    with pytest.raises(ArgumentError, match=run_id(config)):
        train(config, tmp_path)
    lock.release()
    train(config, tmp_path)


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\x08\0\0\0\0\0\0\0{}      "], ids=["empty", "words", "no format"])
def test_a_broken_checkpoint_is_said_and_kept(content: bytes, tmp_path: Path) -> None:
    config = tiny()
    files = RunFiles(tmp_path, run_id(config))
    files.folder.mkdir(parents=True)
    files.checkpoint.write_bytes(content)
    with pytest.raises(LoadError, match=r"checkpoint\.safetensors.*expected"):
        train(config, tmp_path)
    assert files.checkpoint.read_bytes() == content


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"config": {"steps": 0}}', '{"config": {}, "evaluations": [{}]}'])
def test_a_broken_result_is_said(text: str, tmp_path: Path) -> None:
    config = tiny()
    files = RunFiles(tmp_path, run_id(config))
    files.folder.mkdir(parents=True)
    (files.folder / "result.json").write_text(text)
    with pytest.raises(LoadError, match=r"result\.json.*delete it to train the run anew"):
        train(config, tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"id": "0" * 12}, "it is that of the run"),
        ({"config": tiny(seed=7).model_dump(mode="json")}, f"it is that of the run {run_id(tiny(seed=7))}"),
        ({"status": 7}, "status is 7"),
        ({"ended": "last"}, "ended 'last'"),
        ({"machine": None}, "machine is None"),
        ({"evaluations": []}, "it has no held-out loss"),
    ],
)
def test_a_result_that_another_hand_changed_is_said(change: dict[str, object], said: str, tmp_path: Path) -> None:
    config = tiny(steps=1)
    files = RunFiles(tmp_path, run_id(config))
    train(config, tmp_path)
    path = files.folder / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(LoadError, match=rf"result\.json: .*{said}.*delete it to train the run anew"):
        files.result()


def test_a_checkpoint_of_another_model_is_said_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "SAVE_EVERY", 0.0)
    config, other = tiny(), tiny(model=MODEL.model_copy(update={"width": 14}))
    with pytest.raises(StoppedError, match=r"^3$"):
        train(other, tmp_path, stop_after(3))
    files = RunFiles(tmp_path, run_id(config))
    files.folder.mkdir()
    RunFiles(tmp_path, run_id(other)).checkpoint.rename(files.checkpoint)
    content = files.checkpoint.read_bytes()
    with pytest.raises(LoadError, match=r"checkpoint\.safetensors: RuntimeError: .*expected the checkpoint of this run"):
        train(config, tmp_path)
    assert files.checkpoint.read_bytes() == content


def test_the_same_examples_come_whatever_the_model_is() -> None:
    seen = []
    for model in (MODEL, MODEL.model_copy(update={"rule": "none", "head_dim": 17})):
        trial = training.Trial(tiny(model=model), RunFiles(Path("nowhere"), "x"))
        seen.append([trial.task.batch(3, trial.order).targets for _ in range(3)])
    for one, two in zip(*seen, strict=True):
        assert torch.equal(one, two)


def test_tokens_a_second_are_those_of_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = training.Trial.evaluate

    def slow(*given: Any) -> Any:
        time.sleep(0.3)
        return evaluate(*given)

    monkeypatch.setattr(training.Trial, "evaluate", slow)
    monkeypatch.setattr(training, "SAVE_EVERY", 0.0)
    config = tiny()
    with pytest.raises(StoppedError, match=r"^10$"):
        train(config, tmp_path, stop_after(10))
    result = train(config, tmp_path)
    tokens = config.steps * config.batch * config.task.length
    evaluations = math.ceil(config.steps / config.evaluate_every)
    assert 0 < tokens / result.tokens_per_second < result.seconds - 0.3 * evaluations


def test_the_peak_of_a_run_in_parts_is_the_largest_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "SAVE_EVERY", 0.0)
    config, peaks = tiny(), {3: 200.0, 6: 700.0, 9: 100.0}
    for stop, peak in peaks.items():
        monkeypatch.setattr(training.PeakMemory, "so_far", lambda _self, peak=peak: peak)
        with pytest.raises(StoppedError, match=f"^{stop}$"):
            train(config, tmp_path, stop_after(stop))
    assert train(config, tmp_path).peak_mib == 700.0
    unknown = tiny(seed=1)
    monkeypatch.setattr(training.PeakMemory, "so_far", lambda _self: math.nan)
    assert math.isnan(train(unknown, tmp_path).peak_mib)


def test_threads_are_given_back(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    train(tiny(threads=before + 1, task=TASK), tmp_path)
    assert torch.get_num_threads() == before
