"""A loop with accelerate: its wrapped model is watched like any other, and its trackers get the scalars."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import GeneralTracker, on_main_process

from attemper.monitor import StepRecord, Watch, watch
from attemper.monitor.callbacks.accelerate import AcceleratorLog
from attemper.monitor.clipping import QKClip
from attemper.monitor.trackers.summary import Summary
from tests.monitor.callbacks.training import BATCH, RATE, Counting, assert_same, llama, micro_batches, plain, tokens


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Accelerators of one process share their state, the precision and the accumulation among it."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Got(GeneralTracker):
    name, requires_logging_directory = "got", False

    def __init__(self) -> None:
        super().__init__()
        self.logged: dict[int | None, dict[str, Any]] = {}

    @property
    def tracker(self) -> None:
        return None

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.logged[step] = values


def trained(accelerator: Accelerator, *trackers: Any, clip: float | None = None) -> None:
    """4 steps of two batches each, as `plain` makes them."""
    inner = llama()
    model, optimizer = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=RATE))
    with watch(model, trackers=list(trackers)) as watching:
        assert Watch.of(inner) is watching
        clipping = None if clip is None else QKClip(model, clip, watch=watching)
        step, loss = 0, 0.0
        for batch in tokens(8 * BATCH).split(BATCH):
            with accelerator.accumulate(model):
                part = model(input_ids=batch, labels=batch).loss
                accelerator.backward(part)
                loss += part.item() / accelerator.gradient_accumulation_steps
                optimizer.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:
                    step += 1
                    scalars = {}
                    if clipping is not None:
                        clipping.step()
                        scalars = clipping.scalars()
                    watching.step(step, loss=loss, **scalars)
                    loss = 0.0
    accelerator.end_training()


def test_records_are_those_of_a_plain_loop() -> None:
    got, counting = Got(), Counting()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, log_with=got)
    accelerator.init_trackers("run")
    trained(accelerator, AcceleratorLog(accelerator), counting)
    assert_same(counting.records, plain(micro_batches(8 * BATCH, 2)))
    summary = Summary(500, "")
    assert got.logged == {record.step: summary.scalars(record) for record in counting.records}
    assert {"attention/max_logit", "attention/model.layers.1.self_attn/max_logit", "watch/loss"} <= got.logged[1].keys()
    assert all(type(value) is float for values in got.logged.values() for value in values.values())


def test_clipped_in_the_steps_of_the_optimiser() -> None:
    records: list[StepRecord] = []
    trained(Accelerator(cpu=True, gradient_accumulation_steps=2), records.append, clip=5.0)
    assert_same(records, plain(micro_batches(8 * BATCH, 2), clip=5.0))
    assert records[0].scalars["clipped_heads"] > 0


def test_fewer_scalars() -> None:
    logged: dict[int | None, dict[str, Any]] = {}

    class Logs:
        def log(self, values: dict[str, Any], step: int | None = None) -> None:
            logged[step] = values

    model = llama()
    with watch(model, trackers=AcceleratorLog(Logs(), most=20)) as watching:
        model(input_ids=tokens(BATCH))
        watching.step(7)
    assert list(logged) == [7]
    assert {name.split("/")[1] for name in logged[7] if name.count("/") == 2} == {"model.layers.0.self_attn"}
