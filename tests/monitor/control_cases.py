"""Cases of QKClip and Penalties on two processes with data of their own, under DDP, FSDP2 and tensor parallelism."""

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from attemper.monitor import watch
from attemper.monitor.clipping import QKClip
from attemper.monitor.penalties import Penalties
from attemper.weights import ClipReport
from tests.monitor.measuring import measured
from tests.monitor.small import Causal, Decoder, drawn, loss_of


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return getattr(tensor, "full_tensor", tensor.clone)().detach()


def agreed(report: ClipReport | None) -> ClipReport:
    """The report, once it is known that all processes have the same."""
    everybody: list[ClipReport | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, report)
    assert report is not None
    assert everybody == [report] * len(everybody)
    return report


def trained(model: nn.Module, threshold: float, tokens: list[Tensor]) -> int:
    """How many heads were clipped in a run of a sharded model, each clip of which held for this process's data."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    clip, clipped = QKClip(model, threshold, watch=watch(model)), 0
    for batch in tokens:
        loss_of(model, batch).backward()
        # Before the optimiser's step, so that the weights are those that were measured.
        clipped += len(agreed(clip.step()).clips)
        first = measured(model, {"input_ids": batch})["blocks.0.self_attn"]
        assert float(first.max()) <= threshold * (1 + 1e-5)
        model.reshard()  # pyrefly: ignore[not-callable]  (what was measured had no backward pass, which does this)
        optimizer.step()
        optimizer.zero_grad()
    return clipped


def case_clipping_under_fully_shard() -> None:
    torch.manual_seed(3)
    model = Decoder()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    assert trained(model, 5.0, [drawn(10 * step + dist.get_rank()) for step in range(8)]) > 2


def case_clipping_under_ddp() -> None:
    torch.manual_seed(3)
    model = nn.parallel.DistributedDataParallel(Decoder())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    clip, clipped = QKClip(model, 5.0, watch=watch(model.module)), 0
    for step in range(8):
        loss_of(model, drawn(10 * step + dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        clipped += len(agreed(clip.step()).clips)
    assert clipped > 2
    for weight in model.parameters():
        other = weight.detach().clone()
        dist.broadcast(other, 0)
        assert torch.equal(other, weight)


def case_clipping_under_tensor_parallelism() -> None:
    """Heads are counted over the whole model; the bits of the weights are those of one process that saw the same maxima."""
    torch.manual_seed(3)
    model, x = nn.Sequential(Causal(4), Causal(4)), torch.randn(2, 13, 28)
    with torch.no_grad():
        for layer in model:
            layer.q_proj.weight.mul_(9.0)  # pyrefly: ignore
    alone = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2,))
    plan = {f"{layer}.{one}_proj": ColwiseParallel() for layer in "01" for one in "qkv"}
    parallelize_module(model, mesh, plan | {f"{layer}.o_proj": RowwiseParallel() for layer in "01"})
    source = watch(model)
    clip = QKClip(model, 3.0, watch=source)
    model(x)
    seen: dict[str, Tensor] = {}

    class Once:
        def maxima(self) -> dict[str, Tensor]:
            return dict(seen)

    clip_alone = QKClip(alone, 3.0, watch=Once())
    taken = source.maxima()
    seen |= taken
    assert [list(each.shape) for each in taken.values()] == [[4], [4]]
    model(x)
    report, expected = agreed(clip.step()), clip_alone.step()
    assert report == expected
    assert len(report.clips) > 2
    for name, weight in alone.named_parameters():
        assert torch.equal(whole(dict(model.named_parameters())[name]), weight), name


def _penalised(model: nn.Module, x: Tensor) -> None:
    with Penalties(model, 1e-2, (0.9, 0.5)) as penalties:
        (model(x).square().mean() + penalties()).backward()


def _mean_of_ranks(draws: list[Tensor]) -> dict[str, Tensor]:
    """What one process computes of the data of both."""
    torch.manual_seed(3)
    model = nn.Sequential(Causal(4), Causal(4))
    for x in draws:
        _penalised(model, x)
    return {name: whole(weight.grad) / len(draws) for name, weight in model.named_parameters()}


def case_penalties_under_ddp_and_fully_shard() -> None:
    draws = [torch.randn(2, 13, 28, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    expected = _mean_of_ranks(draws)
    for wrap in (nn.parallel.DistributedDataParallel, fully_shard):
        torch.manual_seed(3)
        model = wrap(nn.Sequential(Causal(4), Causal(4)))
        _penalised(model, draws[dist.get_rank()])
        for name, weight in model.named_parameters():
            torch.testing.assert_close(whole(weight.grad), expected[name.removeprefix("module.")], rtol=1e-5, atol=1e-6)
