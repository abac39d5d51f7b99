"""Lightning's Trainer, with the callback: the records of a plain loop, whatever happens in between.

The package named `lightning` is never imported here; a module of its name stands for it.
"""

import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor

import attemper.monitor.callbacks.lightning
from attemper.errors import MissingExtraError, UnsupportedError
from attemper.monitor import StepRecord
from attemper.monitor.callbacks.lightning import AttemperCallback
from attemper.monitor.clipping import QKClip
from attemper.monitor.trackers.summary import headline
from tests.monitor.callbacks.lightning_loop import Module, trained
from tests.monitor.callbacks.training import BATCH, RATE, Counting, assert_same, micro_batches, plain

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning"),  # pytorch-lightning 2.6 with torch 2.13
    pytest.mark.filterwarnings("ignore:The '(train|val)_dataloader' does not have many workers"),
]


class Logged(CSVLogger):
    """What loggers get."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.got: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.got.append({name: value for name, value in metrics.items() if name.startswith("attention/")})


def test_records_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    counting, logged, module = Counting(), Logged(tmp_path), Module()
    trained(module, AttemperCallback(trackers=counting), logger=logged, val_check_interval=2)
    assert_same(counting.records, plain(micro_batches(8 * BATCH, 2)), within="net.")
    assert (counting.begun, counting.closed) == (1, 1)
    assert "training_step" not in vars(module)
    figures = [each for each in logged.got if each]
    assert figures == [pytest.approx(headline(record)) for record in counting.records]


def test_steps_between_records(tmp_path: Path) -> None:
    counting, logged = Counting(), Logged(tmp_path)
    trained(Module(), AttemperCallback(every=2, layers="*.1.self_attn", trackers=counting), logger=logged, log_every_n_steps=2)
    assert [record.step for record in counting.records] == [1, 2, 4]
    assert [len(record.layers) for record in counting.records] == [1, 1, 1]
    assert [each for each in logged.got if each] == [pytest.approx(headline(record)) for record in counting.records[1:]]


class Twice(Module):
    """One that calls its forward pass and its parts, and steps two optimisers by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def forward(self, batch: Tensor) -> Tensor:
        return self.net(input_ids=batch, labels=batch).loss

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        loss = self(batch[:1]) + self.net(input_ids=batch[1:], labels=batch[1:]).loss
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()
        return {"loss": loss.detach()}

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        decoder, head = self.net.model, self.net.lm_head
        return [torch.optim.SGD(decoder.parameters(), lr=RATE), torch.optim.SGD(head.parameters(), lr=RATE)]


def test_everything_that_a_step_calls_is_measured() -> None:
    counting = Counting()
    trainer = trained(Twice(), AttemperCallback(every=2, trackers=counting), accumulate_grad_batches=1)
    assert trainer.global_step == 16  # each optimiser counts
    assert [record.step for record in counting.records] == [1, 2, 4, 6, 8]
    once = plain([(each,) for (each,) in micro_batches(8 * BATCH)])
    first = counting.records[0].layers
    assert sum(int(layer.stats.rows.sum()) for layer in first) == sum(int(layer.stats.rows.sum()) for layer in once[0].layers)
    largest = [max(float(layer.scaled_max.max()) for layer in first if "layers.0" in layer.name)]
    assert largest == pytest.approx([float(once[0].layers[0].scaled_max.max())])


def test_clipped_as_in_a_plain_loop(tmp_path: Path) -> None:
    counting, logged = Counting(), Logged(tmp_path)
    callback = AttemperCallback(clip=5.0, trackers=counting)
    trained(Module(), callback, logger=logged)
    expected = plain(micro_batches(8 * BATCH, 2), clip=5.0)
    assert_same(counting.records, expected, within="net.")
    clipped = [each.scalars["clipped_heads"] for each in expected]
    assert [each["attention/clipped_heads"] for each in logged.got if each] == clipped
    assert clipped[0] > 0


def counts(clip: QKClip | None) -> dict[str, list[int]]:
    assert clip is not None
    return {name: each.tolist() for name, each in clip.total.items()}


def test_a_training_that_is_resumed_goes_on(tmp_path: Path) -> None:
    class Saves(Callback):
        def on_train_batch_end(self, trainer: Trainer, *rest: Any) -> None:
            if trainer.global_step == 3 and not (tmp_path / "third").exists():
                trainer.save_checkpoint(tmp_path / "third")

    arguments: dict[str, Any] = {"clip": 5.0, "every": 2, "alarms": {"alarming-logit": 3.0}}
    whole = AttemperCallback(**arguments)
    trained(Module(), whole, Saves())
    saved = torch.load(tmp_path / "third", weights_only=True)["callbacks"]["AttemperCallback"]
    assert saved["steps"] == 3

    records: list[StepRecord] = []
    again = AttemperCallback(**arguments, trackers=records.append)
    again.load_state_dict(saved)
    module = Module()
    trained(module, again, max_steps=1)  # the batches of step 1, under the number of the fourth
    assert [record.step for record in records] == [4]
    assert [record.alarms for record in records] == [()]
    total = {name: sum(each) for name, each in counts(again.clip).items()}
    before = {name: int(each.sum()) for name, each in saved["clip"]["total"].items()}
    assert all(total[name] >= before[name] for name in total)
    assert sum(total.values()) > sum(before.values()) > 0


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_lightning_hands_back_what_its_checkpoint_kept(tmp_path: Path) -> None:
    first = AttemperCallback(clip=5.0)
    trainer = trained(Module(), first)
    trainer.save_checkpoint(tmp_path / "saved")
    records: list[StepRecord] = []
    second = AttemperCallback(clip=5.0, trackers=records.append)
    trained(Module(), second, path=tmp_path / "saved", max_epochs=2)
    assert [record.step for record in records] == [5, 6, 7, 8]
    assert sum(map(sum, counts(second.clip).values())) >= sum(map(sum, counts(first.clip).values())) > 0


def test_an_alarm_stops_training_if_it_is_grave_enough() -> None:
    stopped = AttemperCallback(stop_on="warning", alarms={"alarming-logit": 3.0})
    assert trained(Module(), stopped).global_step == 1
    assert stopped.alarm is not None
    assert (stopped.alarm.code, stopped.alarm.step) == ("ATT501", 1)

    warned = AttemperCallback(stop_on="error", alarms={"alarming-logit": 3.0})
    assert trained(Module(), warned).global_step == 4
    assert warned.alarm is None


def test_exceptions_remove_the_watch() -> None:
    class Broken(Module):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            if self.global_step == 2:
                raise RuntimeError("broken in a validation")

    counting, module = Counting(), Broken()
    callback = AttemperCallback(trackers=counting)
    with pytest.raises(RuntimeError, match="broken in a validation"):
        trained(module, callback, val_check_interval=4)
    assert (counting.begun, counting.closed, len(counting.records)) == (1, 1, 2)
    assert "training_step" not in vars(module)
    trained(Module(), callback)
    assert (counting.begun, counting.closed, len(counting.records)) == (2, 2, 6)


def test_nothing_is_left_on_a_module_of_which_nothing_can_be_clipped() -> None:
    class Plain(Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(3, 3)

    counting, module = Counting(), Plain()
    with pytest.raises(ValueError, match="model: got Plain without any that can be clipped"):
        trained(module, AttemperCallback(clip=5.0, trackers=counting), num_sanity_val_steps=0)
    assert "training_step" not in vars(module)
    assert (counting.begun, counting.closed) == (1, 1)


def test_a_training_step_of_the_instance_is_put_back() -> None:
    module = Module()
    step: Callable[..., Tensor] = lambda batch, batch_idx: module.net(input_ids=batch, labels=batch).loss  # noqa: E731
    module.training_step = step
    counting = Counting()
    trained(module, AttemperCallback(trackers=counting))
    assert module.training_step is step
    assert len(counting.records) == 4


@pytest.mark.slow
def test_a_compiled_part_is_watched_and_a_compiled_module_refused() -> None:
    module, counting = Module(), Counting()
    module.net.compile(backend="eager")
    trained(module, AttemperCallback(trackers=counting), accumulate_grad_batches=1)
    assert_same(counting.records, plain(micro_batches(8 * BATCH)), within="net.")

    with pytest.raises(UnsupportedError, match=r"the training_step of Module is compiled as a whole.*module\.NAME\.compile\(\)"):
        trained(torch.compile(Module(), backend="eager"), AttemperCallback())


def base_beside(monkeypatch: pytest.MonkeyPatch, present: tuple[str, ...], installed: tuple[str, ...] = ()) -> type:
    """Of the callback, made anew where these modules have been imported, and those packages could be."""
    for name in ("pytorch_lightning", "lightning", "lightning.pytorch"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def module_of(name: str) -> types.ModuleType:
        module = types.ModuleType(name)
        module.Callback = type("Callback", (), {"__module__": name})
        return module

    for name in present:
        monkeypatch.setitem(sys.modules, name, module_of(name))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(importlib, "import_module", module_of)
    source = Path(attemper.monitor.callbacks.lightning.__file__)
    fresh = types.ModuleType("fresh")
    exec(compile(source.read_text("utf-8"), str(source), "exec"), vars(fresh))
    return fresh.AttemperCallback.__bases__[-1]


def test_the_name_that_the_program_uses_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert AttemperCallback.__bases__[-1] is Callback
    both = ("lightning", "pytorch_lightning")
    for present, installed, expected in [
        (("pytorch_lightning",), both, "pytorch_lightning"),
        (("lightning", "lightning.pytorch"), both, "lightning.pytorch"),
        (("lightning",), both, "pytorch_lightning"),  # lightning.fabric alone is in use
        ((), both, "pytorch_lightning"),
        ((), ("lightning",), "lightning.pytorch"),
    ]:
        with monkeypatch.context() as patch:
            assert base_beside(patch, present, installed).__module__ == expected
    with (
        monkeypatch.context() as patch,
        pytest.raises(MissingExtraError, match=r"pytorch-lightning is needed.*attemper\[lightning\]"),
    ):
        base_beside(patch, ())
