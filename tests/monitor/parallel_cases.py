"""Cases of `attemper.watch` under every way to train one model on four processes; one process must get the same record."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import attemper
from attemper.monitor import LayerRecord, StepRecord

VOCABULARY, WIDTH, HEADS, KV_HEADS, HEAD_DIM, LAYERS, TOKENS, BATCH = 23, 40, 4, 2, 10, 3, 13, 8
MICRO_BATCH = 2  # a rank's share under data parallelism, and one of the four that go through a pipeline


class Attention(nn.Module):
    """As many heads as its projections give: some of them where they are sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False) for _ in "kv")
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for one in (self.q_proj, self.k_proj, self.v_proj))
        output = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(output.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.down(torch.relu(self.up(x)))


class Decoder(nn.Module):
    """Layers lie in a dict, so that a stage of a pipeline keeps the names of those that it has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(LAYERS)})
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for block in self.layers.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def batches() -> tuple[Tensor, ...]:
    """The micro-batches of a step."""
    generator = torch.Generator().manual_seed(11)
    return torch.randint(VOCABULARY, (BATCH, TOKENS), generator=generator).split(MICRO_BATCH)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


ALONE: list[dist.ProcessGroup] = []


def case_groups_are_made() -> None:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    ALONE.append(groups[dist.get_rank()])


def alone(steps: int = 2) -> list[StepRecord]:
    """The records of one process that takes the micro-batches one after the other."""
    return trained(Decoder(), batches(), steps, group=ALONE[0])


def trained(model: nn.Module, mine: tuple[Tensor, ...], steps: int = 2, **options: Any) -> list[StepRecord]:
    """The records of some steps of training; the micro-batches given are this process's share of each of them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    with attemper.watch(model, **options) as watching:
        for _ in range(steps):
            for tokens in mine:
                (loss_of(model(tokens), tokens) / len(mine)).backward()
            optimizer.step()
            optimizer.zero_grad()
            record = watching.step()
            assert record is not None
            found.append(record)
        assert not watching.unseen()
    return found


def same(found: StepRecord, expected: StepRecord, exactly: Callable[[LayerRecord], bool]) -> None:
    """The same layers, rows and, where arithmetic is the same too, extremes to the bit; otherwise within rounding."""
    assert [record.name for record in found.layers] == [record.name for record in expected.layers]
    assert [record.name for record in found.layers] == [f"layers.{number}.attention" for number in range(LAYERS)]
    for ours, theirs in zip(found.layers, expected.layers, strict=True):
        assert torch.equal(ours.stats.rows, theirs.stats.rows)
        assert torch.equal(ours.stats.rows, torch.full((HEADS,), BATCH * TOKENS))
        assert torch.equal(ours.stats.softmax_rows, theirs.stats.softmax_rows)
        if exactly(ours):
            assert torch.equal(ours.stats.extremes, theirs.stats.extremes), ours.name
            assert torch.equal(ours.scaled_max, theirs.scaled_max)
            assert all(torch.equal(ours.stats.histograms[name], one) for name, one in theirs.stats.histograms.items())
        torch.testing.assert_close(ours.stats.extremes, theirs.stats.extremes, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.scaled_max, theirs.scaled_max, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.stats.sums, theirs.stats.sums, rtol=1e-5, atol=1e-5)


def same_run(found: list[StepRecord], exactly: Callable[[LayerRecord], bool] = lambda _: True) -> None:
    """The first step starts from the same weights; later ones from weights whose gradients were added in another order."""
    first, *later = zip(found, alone(), strict=True)
    same(*first, exactly)
    for ours, theirs in later:
        same(ours, theirs, lambda _: False)


def case_ddp() -> None:
    model = DistributedDataParallel(Decoder())
    same_run(trained(model, (batches()[dist.get_rank()],)))


def case_ddp_with_accumulation_on_two_ranks() -> None:
    """Two ranks have two micro-batches each, and two stand by with nothing at all, yet take part in every step."""
    rank = dist.get_rank()
    model = Decoder()
    with attemper.watch(model) as watching:
        for tokens in batches()[2 * rank : 2 * rank + 2] if rank < 2 else ():
            loss_of(model(tokens), tokens).backward()
        record = watching.step()
    assert record is not None
    same(record, alone(1)[0], lambda _: True)


def fsdp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in model.layers.values():
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def case_fsdp() -> None:
    model = fsdp(Decoder(), init_device_mesh("cpu", (4,), mesh_dim_names=("data",)))
    same_run(trained(model, (batches()[dist.get_rank()],)))


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, attention: bool) -> nn.Module:
    styles: dict[str, Any] = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
    if attention:
        styles |= {f"layers.*.attention.{name}_proj": ColwiseParallel() for name in "qkv"}
        styles |= {"layers.*.attention.o_proj": RowwiseParallel()}
    return parallelize_module(model, mesh, styles)


def case_tensor_parallelism() -> None:
    """Two ranks share out the heads; the other two are a copy of them that sees the other half of the batch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    data = mesh.get_local_rank("data")
    for attention in (True, False):
        model = tensor_parallel(Decoder(), mesh["tensor"], attention)
        found = trained(model, batches()[2 * data : 2 * data + 2], steps=1)
        first = None if attention else "layers.0.attention"  # before anything sharded was added up in another order
        same(found[0], alone(1)[0], lambda record, first=first: record.layer == first)


def case_tensor_parallelism_within_fsdp() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    data = mesh.get_local_rank("data")
    model = fsdp(tensor_parallel(Decoder(), mesh["tensor"], True), mesh["data"])
    same_run(trained(model, batches()[2 * data : 2 * data + 2]), lambda _: False)


def case_a_pipeline() -> None:
    """Three stages of one layer, and as many micro-batches as a step has; the fourth process has no stage."""
    rank, stages = dist.get_rank(), dist.new_group([0, 1, 2])
    model = Decoder()
    for number in range(LAYERS):
        if number != rank:
            del model.layers[str(number)]
    model.embedding = model.embedding if rank == 0 else None
    model.head = model.head if rank == LAYERS - 1 else None
    with attemper.watch(model) as watching:
        if rank < LAYERS:
            # Shapes that are told: to find them out, the stage would run once more, on memory that nobody has written.
            tokens, hidden, logits = (
                batches()[0],
                torch.empty(MICRO_BATCH, TOKENS, WIDTH, requires_grad=True),
                torch.empty(MICRO_BATCH, TOKENS, VOCABULARY, requires_grad=True),
            )
            shapes = {"input_args": hidden if rank else tokens, "output_args": logits if rank == LAYERS - 1 else hidden}
            stage = PipelineStage(model, rank, LAYERS, torch.device("cpu"), group=stages, **shapes)
            schedule = ScheduleGPipe(stage, BATCH // MICRO_BATCH, loss_fn=loss_of)
            tokens = torch.cat(batches())
            schedule.step(*([tokens] if rank == 0 else []), **({"target": tokens} if rank == LAYERS - 1 else {}))
        record = watching.step()
    assert record is not None
    same(record, alone(1)[0], lambda _: True)


def case_maxima() -> None:
    model = DistributedDataParallel(Decoder())
    reference = Decoder()
    with attemper.watch(model) as watching, attemper.watch(reference, group=ALONE[0]) as other:
        watching.maxima()
        other.maxima()
        model(batches()[dist.get_rank()])
        for tokens in batches():
            reference(tokens)
        found, expected = watching.maxima(), other.maxima()
        assert list(found) == list(expected) == [f"layers.{number}.attention" for number in range(LAYERS)]
        assert all(torch.equal(found[layer], expected[layer]) for layer in expected)
