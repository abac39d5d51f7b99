"""Compiled models tell of their calls from their graphs, or run eagerly in the steps that are measured."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.utils
import torch.nn.functional as F
from torch import Tensor, nn

import attemper
from attemper.monitor import StepRecord
from tests.monitor.test_watching import drawn, llama, logged, train

BACKEND = "aot_eager"
# Where a graph begins within a model, torch.compile looks whether its inputs have gradients.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def alike(a: StepRecord | None, b: StepRecord | None) -> None:
    """The same rows, within the rounding of compiled code."""
    for x, y in zip(logged(a).layers, logged(b).layers, strict=True):
        assert x.name == y.name
        assert torch.equal(x.stats.counts, y.stats.counts)
        torch.testing.assert_close(x.stats.extremes, y.stats.extremes, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(x.stats.sums, y.stats.sums, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(x.scaled_max, y.scaled_max, rtol=1e-4, atol=1e-6)


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def compiled(model: Any, how: str) -> nn.Module:
    if how == "around":
        return torch.compile(model, backend=BACKEND)
    for part in [model] if how == "in place" else model.model.layers:
        part.compile(backend=BACKEND)
    return model


@pytest.mark.parametrize("mode", ["observe", "use"])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("how", ["around", "in place", "layer by layer"])
def test_graphs_tell_of_their_calls(how: str, checkpointed: bool, mode: Any) -> None:
    """One graph, or one for all layers, no breaks, no recompilation, and the record that the model gives uncompiled."""
    model = llama(attn_implementation="sdpa").train()
    if checkpointed:
        model.activation_checkpointing_enable({"use_reentrant": False})
    with attemper.watch(model, mode=mode) as watching:
        wanted = []
        for step in range(4):
            train(model, drawn(step))
            wanted.append(watching.step())
    with attemper.watch(model, mode=mode) as watching:
        fast, counted = compiled(model, how), []
        for step in range(4):
            train(fast, drawn(step))
            alike(wanted[step], watching.step())
            counted.append(graphs())
    assert counted == [0, 1, 1, 1]  # the first step shows what calls there are, and runs eagerly
    assert not torch._dynamo.utils.counters["graph_break"]


def test_all_passes_of_the_first_step_count() -> None:
    model = llama(attn_implementation="sdpa").train()
    fast = compiled(model, "layer by layer")
    with attemper.watch(model) as watching:
        for _ in range(3):
            records = [train(fast, drawn(0)) for _ in range(2)]
            record = logged(watching.step())
            assert record.layers[0].stats.rows.tolist() == [len(records) * 65] * 4
    assert graphs() == 1


def test_evaluation_of_a_compiled_model_does_not_count() -> None:
    model = llama(attn_implementation="sdpa").train()
    fast = torch.compile(model, backend=BACKEND)
    with attemper.watch(fast) as watching:
        for _ in range(2):
            train(fast, drawn(0))
            alone = watching.step()
        model.eval()
        with torch.no_grad():
            fast(input_ids=drawn(1))
        model.train()
        train(fast, drawn(0))
        alike(alone, watching.step())


def test_a_model_that_was_compiled_and_ran_before_is_seen() -> None:
    model = llama(attn_implementation="sdpa").train()
    fast = torch.compile(model, backend=BACKEND)
    train(fast, drawn(0))
    with attemper.watch(fast) as watching:
        for _ in range(2):
            train(fast, drawn(0))
            record = watching.step()
    with attemper.watch(model) as watching:
        train(model, drawn(0))
        alike(record, watching.step())


class Own(nn.Module):
    """Calls scaled_dot_product_attention itself."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(12, 36)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).view(*x.shape[:2], 3, 2, 6).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def test_a_model_whose_graphs_cannot_tell_runs_eagerly_in_measured_steps_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Own(), Own()).train()
    ran = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        def run(*given: Any) -> Any:
            ran.append("graph")
            return graph(*given)

        return run

    fast = torch.compile(model, backend=backend)
    with attemper.watch(model, every=3) as watching:
        for _ in range(7):
            fast(torch.randn(2, 11, 12)).sum().backward()
            record = watching.step()
            ran.append("measured" if record else "not measured")
            assert record is None or [layer.layer for layer in record.layers] == ["0", "1"]
    assert logged(record).layers[1].stats.rows.tolist() == [22, 22]
    assert ran == [*["measured", *["graph", "not measured"] * 2] * 2, "measured"]
    assert graphs() == 1
    assert not torch._dynamo.utils.counters["graph_break"]
