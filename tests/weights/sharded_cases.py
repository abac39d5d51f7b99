"""Cases of weights that lie in shards on two processes: edited in place, to the bits of the same edit in one process."""

import copy

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from attemper.errors import ArgumentError
from attemper.scales import Constant
from attemper.weights import find_projections, fold_scale, qk_clip_
from tests.capture.architectures import build


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
    mesh = init_device_mesh("cpu", (2,))
    if how == "fully_shard":
        return fully_shard(model, mesh=mesh)
    plan = {f"{name}.{one}_proj": ColwiseParallel() for name in find_projections(model) for one in "qkv"}
    plan |= {f"{name}.o_proj": RowwiseParallel() for name in find_projections(model)}
    return parallelize_module(model, mesh, plan)


def compared(name: str, how: str) -> None:
    model, _ = made(name)
    alone, limits, before = copy.deepcopy(model), maxima(model), whole(model)
    expected = qk_clip_(alone, limits)
    model = sharded(model, how)
    assert any(hasattr(weight, "placements") for weight in model.parameters())
    report = qk_clip_(model, limits)
    assert report.clips == expected.clips
    assert report.edits == expected.edits  # exact and rounding too, which are over all shards
    weights = whole(model)
    assert [key for key, weight in weights.items() if not torch.equal(weight, before[key])] != []
    assert [key for key, weight in whole(alone).items() if not torch.equal(weight, weights[key])] == []


def case_fully_shard_separate() -> None:
    compared("llama", "fully_shard")


def case_fully_shard_fused_in_columns() -> None:
    compared("gpt2", "fully_shard")


def case_fully_shard_gains() -> None:
    compared("qwen3", "fully_shard")
    compared("gemma3", "fully_shard")  # used as 1 + w


def case_fully_shard_latent() -> None:
    compared("deepseek_v3", "fully_shard")


def case_fully_shard_torch_own() -> None:
    compared("siglip", "fully_shard")


def case_tensor_parallel() -> None:
    compared("llama", "columns")


def case_tensor_parallel_gains() -> None:
    compared("qwen3", "columns")


def case_fully_shard_over_tensor_parallel() -> None:
    for sides in ((1, 2), (2, 1)):
        model, _ = made("llama")
        alone, limits = copy.deepcopy(model), maxima(model)
        qk_clip_(alone, limits)
        mesh = init_device_mesh("cpu", sides, mesh_dim_names=("data", "heads"))
        plan = {f"{name}.{one}_proj": ColwiseParallel() for name in limits for one in "qkv"}
        fully_shard(parallelize_module(model, mesh["heads"], plan), mesh=mesh["data"])
        qk_clip_(model, limits)
        weights = whole(model)
        assert [key for key, weight in whole(alone).items() if not torch.equal(weight, weights[key])] == []


def case_an_evaluation_left_weights_gathered() -> None:
    """`fully_shard` leaves the root's weights so after a forward pass without a backward one: an edit there would be lost."""
    model, inputs = made("llama")
    alone, limits = copy.deepcopy(model), maxima(model)
    qk_clip_(alone, limits)
    model = sharded(model, "fully_shard")
    with torch.no_grad():
        before = model(**inputs).logits
        assert [name for name, weight in model.named_parameters() if not hasattr(weight, "placements")] != []
        qk_clip_(model, limits)
        model.reshard()
        after = model(**inputs).logits
        assert not torch.equal(before, after)
        torch.testing.assert_close(after, alone(**inputs).logits)


def case_an_overflow_on_one_process_stops_all() -> None:
    model = nn.MultiheadAttention(22, 2, dtype=torch.float16)
    with torch.no_grad():
        model.in_proj_weight.normal_()
        model.in_proj_weight[1, 5] = 60000.0
    before, model, message = whole(model), sharded(model, "fully_shard"), ""
    try:
        fold_scale(model, Constant(2.0), Constant(1.0))
    except ArgumentError as error:
        message = str(error)
    assert "in_proj_weight, which would overflow at 1.2e+05; expected numbers up to 6.55e+04" in message
    assert all(torch.equal(weight, before[name]) for name, weight in whole(model).items())
