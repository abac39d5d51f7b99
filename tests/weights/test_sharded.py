"""Weights that lie in shards on several processes: edited in place, to the bits of the same edit in one process."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attemper.errors import ArgumentError
from attemper.scales import Constant
from attemper.weights import find_projections, fold_scale, qk_clip_
from tests.capture.architectures import build
from tests.processes import run_in_processes

FAMILIES = ("llama", "gpt2", "qwen3", "gemma3", "deepseek_v3", "siglip")  # apart, fused in columns, gains as w and as 1 + w, MLA
COLUMNS = ("llama", "qwen3")  # whose projections tensor parallelism splits here by outputs


def made(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    model, inputs = build(name, gain=2.0)
    torch.manual_seed(13)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim < 2:
                weight.add_(torch.randn_like(weight), alpha=0.5)
    return model, inputs


def maxima(model: nn.Module) -> dict[str, Tensor]:
    """Every second head over 100, by another factor each."""
    return {
        name: torch.tensor([40.0 + 77.0 * head if head % 2 else 3.0 for head in range(one.heads)])
        for name, one in find_projections(model).items()
    }


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: getattr(weight, "full_tensor", weight.clone)().detach() for name, weight in model.named_parameters()}


def sharded(model: nn.Module, how: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))
    if how == "fully_shard":
        return fully_shard(model, mesh=mesh)
    plan = {f"{name}.{one}_proj": ColwiseParallel() for name in find_projections(model) for one in "qkv"}
    plan |= {f"{name}.o_proj": RowwiseParallel() for name in find_projections(model)}
    return parallelize_module(model, mesh, plan)


def clipped(name: str, how: str) -> dict[str, Any]:
    model, _ = made(name)
    alone, limits = copy.deepcopy(model), maxima(model)
    expected = qk_clip_(alone, limits)
    model = sharded(model, how)
    report = qk_clip_(model, limits)
    weights, before = whole(model), whole(made(name)[0])
    return {
        "report": (report.clips, report.edits) == (expected.clips, expected.edits),
        "wrong": [key for key, weight in whole(alone).items() if not torch.equal(weight, weights[key])],
        "changed": [key for key, weight in weights.items() if not torch.equal(weight, before[key])],
        "shards": sum(hasattr(weight, "placements") for weight in model.parameters()),
    }


def after_an_evaluation(_: int) -> dict[str, Any]:
    """`fully_shard` leaves the root's weights gathered after a forward pass without a backward one."""
    model, inputs = made("llama")
    alone, limits = copy.deepcopy(model), maxima(model)
    qk_clip_(alone, limits)
    model = sharded(model, "fully_shard")
    with torch.no_grad():
        before = model(**inputs).logits
        gathered = [name for name, weight in model.named_parameters() if not hasattr(weight, "placements")]
        qk_clip_(model, limits)
        model.reshard()  # pyrefly: ignore
        return {"gathered": gathered, "before": before, "after": model(**inputs).logits, "alone": alone(**inputs).logits}


def overflowing(_: int) -> dict[str, Any]:
    """One number of one process that overflows: no process writes anything."""
    model = nn.MultiheadAttention(22, 2, dtype=torch.float16)
    torch.manual_seed(3)
    with torch.no_grad():
        model.in_proj_weight.normal_()
        model.in_proj_weight[1, 5] = 60000.0
    before, model, message = whole(model), sharded(model, "fully_shard"), ""
    try:
        fold_scale(model, Constant(2.0), Constant(1.0))
    except ArgumentError as error:
        message = str(error)
    return {"message": message, "same": all(torch.equal(weight, before[name]) for name, weight in whole(model).items())}


def twice_sharded(_: int) -> bool:
    """`fully_shard` over tensor parallelism, on a mesh of one by two and one of two by one: strided shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    same = True
    for sides in ((1, 2), (2, 1)):
        model, _ = made("llama")
        alone, limits = copy.deepcopy(model), maxima(model)
        qk_clip_(alone, limits)
        mesh = init_device_mesh("cpu", sides, mesh_dim_names=("data", "heads"))
        plan = {f"{name}.{one}_proj": ColwiseParallel() for name in limits for one in "qkv"}
        fully_shard(parallelize_module(model, mesh["heads"], plan), mesh=mesh["data"])
        qk_clip_(model, limits)
        weights = whole(model)
        same = same and all(torch.equal(weight, weights[key]) for key, weight in whole(alone).items())
    return same


def everything(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {f"fully_shard {name}": clipped(name, "fully_shard") for name in FAMILIES}
    found |= {f"columns {name}": clipped(name, "columns") for name in COLUMNS}
    return found | {"evaluation": after_an_evaluation(rank), "overflow": overflowing(rank), "twice": twice_sharded(rank)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_in_processes(everything, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", [*(f"fully_shard {name}" for name in FAMILIES), *(f"columns {name}" for name in COLUMNS)])
def test_shards_get_the_bits_of_one_process(ranks: list[dict[str, Any]], case: str) -> None:
    for rank in ranks:
        assert rank[case]["shards"] > 0
        assert rank[case]["changed"] != []
        assert rank[case]["wrong"] == []
        assert rank[case]["report"]  # of exact and rounding too, which are over all shards


def test_shards_of_shards(ranks: list[dict[str, Any]]) -> None:
    assert [rank["twice"] for rank in ranks] == [True, True]


def test_weights_that_an_evaluation_left_gathered_are_not_edited_in_the_copy(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["evaluation"]
        assert found["gathered"] != []
        assert not torch.equal(found["before"], found["after"])
        torch.testing.assert_close(found["after"], found["alone"])


def test_an_overflow_on_one_process_stops_all(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "in_proj_weight, which would overflow at 1.2e+05; expected numbers up to 6.55e+04" in rank["overflow"]["message"]
        assert rank["overflow"]["same"]
