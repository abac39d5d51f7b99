"""The Trainer of transformers, with the callback: the records of a plain loop, whatever happens in between."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

from attemper.errors import ArgumentError, UnsupportedError
from attemper.monitor import StepRecord, Watch
from attemper.monitor.callbacks.huggingface import AttemperCallback
from attemper.monitor.trackers.summary import headline
from tests.monitor.callbacks.huggingface_loop import trainer_of
from tests.monitor.callbacks.training import BATCH, Counting, assert_same, llama, micro_batches, plain


class Logs(TrainerCallback):
    """What a callback gets that comes before ours, as those of report_to do."""

    def __init__(self) -> None:
        self.training: list[dict[str, Any]] = []
        self.others: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        (self.training if "loss" in logs else self.others).append(dict(logs))


def test_records_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    counting, logs = Counting(), Logs()
    callback = AttemperCallback(trackers=counting)
    trainer = trainer_of(tmp_path, logs, callback, eval_strategy="steps", eval_steps=1)
    trainer.train()
    assert_same(counting.records, plain(micro_batches(8 * BATCH, 2)))
    assert Watch.of(trainer.model) is None
    assert (counting.begun, counting.closed) == (1, 1)

    figures = [{name: value for name, value in each.items() if name.startswith("attention/")} for each in logs.training]
    assert figures == [headline(record) for record in counting.records]
    assert all(type(value) is float for each in figures for value in each.values())
    assert [each["loss"] for each in logs.training] == pytest.approx([record.scalars["loss"] for record in counting.records])
    assert len(logs.others) == 5  # four evaluations, and the end
    assert not any(name.startswith("attention/") for each in logs.others for name in each)
    assert [each["attention/max_logit"] for each in trainer.state.log_history if "loss" in each] == [
        each["attention/max_logit"] for each in figures
    ]


def test_steps_between_records_and_a_callback_that_is_added_later(tmp_path: Path) -> None:
    counting, logs = Counting(), Logs()
    trainer = trainer_of(tmp_path, logs, logging_steps=2, eval_strategy="steps", eval_steps=1)
    trainer.add_callback(AttemperCallback(every=3, layers="*.1.self_attn", trackers=counting))
    trainer.train()
    assert [record.step for record in counting.records] == [1, 3]
    assert [len(record.layers) for record in counting.records] == [1, 1]
    assert not any(name.startswith("attention/") for each in logs.others for name in each)
    assert [each["attention/max_logit"] for each in logs.training] == [
        headline(record)["attention/max_logit"] for record in counting.records
    ]


def test_clipped_as_in_a_plain_loop(tmp_path: Path) -> None:
    counting, logs = Counting(), Logs()
    callback = AttemperCallback(clip=5.0, trackers=counting)
    trainer_of(tmp_path, logs, callback).train()
    expected = plain(micro_batches(8 * BATCH, 2), clip=5.0)
    assert_same(counting.records, expected)
    assert [each["attention/clipped_heads"] for each in logs.training] == [each.scalars["clipped_heads"] for each in expected]
    assert logs.training[0]["attention/clipped_heads"] > 0
    assert callback.clip is not None
    assert sum(int(each.sum()) for each in callback.clip.total.values()) == sum(
        each["attention/clipped_heads"] for each in logs.training
    )


@pytest.mark.parametrize("by_name", [True, False])
def test_a_training_that_is_resumed_goes_on(tmp_path: Path, by_name: bool) -> None:
    whole = AttemperCallback(clip=5.0, every=2, alarms={"alarming-logit": 3.0})
    records: list[StepRecord] = []
    trainer = trainer_of(tmp_path, whole, save_strategy="steps", save_steps=3, logging_steps=2)
    trainer.train()
    again = AttemperCallback(clip=5.0, every=2, alarms={"alarming-logit": 3.0}, trackers=records.append)
    resumed = trainer_of(tmp_path, again, logging_steps=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3") if by_name else True)
    if not by_name:  # the last checkpoint is the one at the end
        assert records == []
    else:
        assert whole.watch is not None
        assert whole.watch.last is not None
        assert_same(records, [whole.watch.last])
        assert [record.alarms for record in records] == [()]  # told at the first step, before the checkpoint
    assert again.clip is not None
    assert whole.clip is not None
    assert {name: each.tolist() for name, each in again.clip.total.items()} == {
        name: each.tolist() for name, each in whole.clip.total.items()
    }
    assert any(each.any() for each in whole.clip.total.values())


def test_an_alarm_stops_training_if_it_is_grave_enough(tmp_path: Path) -> None:
    stopped = AttemperCallback(stop_on="warning", alarms={"alarming-logit": 3.0})
    trainer = trainer_of(tmp_path, stopped)
    trainer.train()
    assert trainer.state.global_step == 1
    assert stopped.alarm is not None
    assert (stopped.alarm.code, stopped.alarm.step) == ("ATT501", 1)

    warned = AttemperCallback(stop_on="error", alarms={"alarming-logit": 3.0})
    trainer = trainer_of(tmp_path, warned)
    trainer.train()
    assert trainer.state.global_step == 4
    assert warned.alarm is None
    assert warned.watch is not None


class Broken(TrainerCallback):
    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("broken in an evaluation")


def test_exceptions_remove_the_watch(tmp_path: Path) -> None:
    counting, seen = Counting(), 0

    def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        nonlocal seen
        seen += 1
        if seen == 5:
            raise RuntimeError("broken data")
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    callback = AttemperCallback(trackers=counting)
    trainer = trainer_of(tmp_path, callback, Broken(), collate=collate, eval_strategy="steps", eval_steps=2)
    with pytest.raises(RuntimeError, match="broken data"):
        trainer.train()
    assert Watch.of(trainer.model) is None
    assert (counting.begun, counting.closed, len(counting.records)) == (1, 1, 1)
    with pytest.raises(RuntimeError, match="broken in an evaluation"):
        trainer.train()
    assert Watch.of(trainer.model) is None
    assert (counting.begun, counting.closed, len(counting.records)) == (2, 2, 3)


def test_a_training_that_begins_again_with_smaller_batches_counts_nothing_of_the_first(tmp_path: Path) -> None:
    counting, seen = Counting(), 0

    def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        nonlocal seen
        seen += 1
        if seen == 2:
            raise RuntimeError("CUDA out of memory.")
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    trainer_of(tmp_path, AttemperCallback(trackers=counting), collate=collate, auto_find_batch_size=True).train()
    assert (counting.begun, counting.closed) == (2, 2)
    assert seen > 2
    assert [record.step for record in counting.records] == [1, 2, 3, 4]
    assert len({int(layer.stats.rows.sum()) for record in counting.records for layer in record.layers}) == 1


def test_an_alarm_s_own_exception_ends_the_training(tmp_path: Path) -> None:
    def refuse(alarm: Any) -> None:
        raise ValueError(f"not with {alarm.code}")

    trainer = trainer_of(tmp_path, AttemperCallback(on_alarm=refuse, alarms={"alarming-logit": 3.0}))
    with pytest.raises(ValueError, match="not with ATT501"):
        trainer.train()
    assert Watch.of(trainer.model) is None


def test_it_can_be_removed_while_training_goes_on(tmp_path: Path) -> None:
    class Removes(TrainerCallback):
        def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                callback.remove()

    counting = Counting()
    callback = AttemperCallback(trackers=counting, clip=5.0)
    trainer = trainer_of(tmp_path, callback, Removes())
    trainer.train()
    assert trainer.state.global_step == 4
    assert [record.step for record in counting.records] == [1, 2]
    assert counting.closed == 1


def test_two_trainers_in_turn(tmp_path: Path) -> None:
    counting = Counting()
    callback = AttemperCallback(trackers=counting)
    trainers = [trainer_of(tmp_path, callback, max_steps=1) for _ in range(2)]
    for trainer in (*trainers, trainers[0]):
        trainer.train()
    losses = [record.scalars["loss"] for record in counting.records]
    assert losses[0] == losses[1]
    assert losses[2] < losses[0]  # not twice as high: it has been trained a step, and is counted once


@pytest.mark.slow
def test_a_compiled_model(tmp_path: Path) -> None:
    counting = Counting()
    trainer = trainer_of(tmp_path, AttemperCallback(trackers=counting), torch_compile=True, torch_compile_backend="eager")
    trainer.train()
    assert_same(counting.records, plain(micro_batches(8 * BATCH, 2)))


def test_as_a_context_manager_it_is_removed_without_a_trainer() -> None:
    model, arguments, state = llama(), SimpleNamespace(n_gpu=0, output_dir=""), TrainerState()
    with AttemperCallback() as callback:
        callback.on_train_begin(arguments, state, TrainerControl(), model=model)
        assert Watch.of(model) is callback.watch is not None
    assert Watch.of(model) is None


def test_copies_on_several_gpus_are_refused() -> None:
    arguments, state = SimpleNamespace(n_gpu=2, output_dir=""), TrainerState()
    with pytest.raises(UnsupportedError, match=r"one process on 2 GPUs \(DataParallel\).*torchrun"):
        AttemperCallback().on_train_begin(arguments, state, TrainerControl(), model=llama())


def test_arguments_are_checked_where_they_are_written() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'evry'"):
        AttemperCallback(evry=3)
    with pytest.raises(ArgumentError, match="stop_on: got 'fatal'; expected one of 'error', 'warning', 'info', or None"):
        AttemperCallback(stop_on="fatal")
    with pytest.raises(ArgumentError, match=r"clip: got -1\.0; expected a number above 0"):
        AttemperCallback(clip=-1.0)
