"""Cases of gathering, run on four processes: what each rank has is cut out of one whole, which is what must come back."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from attemper.errors import ArgumentError
from attemper.monitor.gathering import LocalLayer, gather, gather_maxima
from attemper.monitor.layout import Plan
from attemper.monitor.records import LayerRecord
from attemper.monitor.sharding import HeadShard, shards
from attemper.ops import row_stats
from attemper.stats import HeadStats

HEADS, KV_HEADS, WIDTH, TOKENS, BATCH = 6, 2, 5, 13, 7
SHARES = (slice(0, 2), slice(2, 5), slice(5, 6), slice(6, 7))  # of the batch, one a rank


class Attention(nn.Module):
    """Projections alone: what tells where the heads are."""

    def __init__(self, heads: int = HEADS, kv_heads: int = KV_HEADS) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(HEADS * WIDTH, heads * WIDTH), nn.Linear(HEADS * WIDTH, kv_heads * WIDTH)
        self.o_proj = nn.Linear(heads * WIDTH, HEADS * WIDTH)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.up, self.down = nn.Linear(HEADS * WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, HEADS * WIDTH)


class Decoder(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))


NAMES = ("layers.0.attention", "layers.1.attention")


def operands(layer: int) -> tuple[Tensor, Tensor]:
    """q and k of a layer for the whole batch, with a row that sees nothing and, in one layer, a NaN."""
    generator = torch.Generator().manual_seed(31 + layer)
    query = torch.randn(BATCH, HEADS, TOKENS, WIDTH, generator=generator)
    key = torch.randn(BATCH, KV_HEADS, TOKENS, WIDTH, generator=generator)
    if layer == 1:
        query[3, 4, 5, 0] = float("nan")
    return query, key


def local(layer: str, query: Tensor, key: Tensor, call: int = 0, scale: float = 0.7) -> LocalLayer:
    rows = row_stats(query, key, is_causal=True, offset=-1, scale=scale)
    stats = HeadStats.from_rows(rows)
    return LocalLayer(layer, call, stats, scale * stats.product_absmax)


def number(layer: str) -> int:
    return int("".join(filter(str.isdigit, layer)))


def part(layer: str, batch: slice, heads: slice = slice(None)) -> LocalLayer:
    """Some of the batch and of the heads; q heads are given as such, their keys repeated."""
    query, key = operands(number(layer))
    key = key.repeat_interleave(HEADS // KV_HEADS, 1)
    return local(layer, query[batch, heads], key[batch, heads])


def whole(layer: str, batch: slice = slice(None)) -> LocalLayer:
    return part(layer, batch)


def same(record: LayerRecord, expected: LocalLayer) -> None:
    """Counts and extremes to the bit, sums within the rounding of an addition in another order."""
    assert (record.layer, record.call) == (expected.layer, expected.call)
    ours, theirs = record.stats, expected.stats
    assert ours.counts.dtype == torch.int64
    assert torch.equal(ours.counts, theirs.counts), (ours.counts, theirs.counts)
    assert torch.equal(ours.extremes, theirs.extremes)
    assert torch.equal(record.scaled_max, expected.scaled_max)
    for name, histogram in ours.histograms.items():
        assert torch.equal(histogram, theirs.histograms[name]), name
        assert histogram.dtype == torch.int64
    rounding = torch.finfo(torch.float64).eps * ours.rows.double() * theirs.sums.abs().clamp(min=1.0)
    assert bool(((ours.sums - theirs.sums).abs() <= rounding).all())


def same_all(records: tuple[LayerRecord, ...], expected: list[LocalLayer]) -> None:
    assert [(record.layer, record.call) for record in records] == [(one.layer, one.call) for one in expected]
    for record, one in zip(records, expected, strict=True):
        same(record, one)


@contextmanager
def collectives(wanted: dict[str, int]) -> Iterator[None]:
    """Count what is called of torch.distributed."""
    counts = dict.fromkeys(wanted, 0)

    def counting(name: str) -> Callable:
        call = getattr(dist, name)

        def counted(*args: object, **kwargs: object) -> object:
            counts[name] += 1
            return call(*args, **kwargs)

        return counted

    with mock.patch.multiple(dist, **{name: counting(name) for name in wanted}):
        yield
    assert counts == wanted


USUAL = {"all_reduce": 2, "all_gather_object": 0}
CHANGED = {"all_reduce": 4, "all_gather_object": 1}


def case_rows_add_up_over_ranks_of_different_batches() -> None:
    plan, share = Plan(Decoder()), SHARES[dist.get_rank()]
    for counted in (CHANGED, USUAL, USUAL):
        with collectives(counted):
            records = gather([part(name, share) for name in NAMES], plan)
        same_all(records, [whole(name) for name in NAMES])


def case_a_usual_step_copies_to_the_host_once() -> None:
    plan, share = Plan(Decoder()), SHARES[dist.get_rank()]
    layers = [part(name, share) for name in NAMES]
    gather(layers, plan)
    copies = []
    with mock.patch.object(Tensor, "cpu", lambda self: copies.append(self.shape) or self.detach().clone()):
        records = gather(layers, plan)
    assert len(copies) == 1
    same_all(records, [whole(name) for name in NAMES])


def case_a_change_on_one_rank_reaches_all() -> None:
    plan, rank = Plan(Decoder(5)), dist.get_rank()
    first, second, third = "layers.1.attention", "layers.3.attention", "layers.2.attention"
    gather([part(first, SHARES[rank])], plan)
    with collectives(CHANGED):  # a layer that one rank alone has
        records = gather([part(first, SHARES[rank])] + [part(second, SHARES[rank])] * (rank == 2), plan)
    same_all(records, [whole(first), whole(second, SHARES[2])])
    with collectives(USUAL):  # a rank has no data
        records = gather([part(first, SHARES[rank])] * (rank != 1), plan)
    assert [record.layer for record in records] == [first]
    assert torch.equal(records[0].stats.rows, torch.full((HEADS,), 4 * 12))
    with collectives(CHANGED):  # two ranks have different new ones, and two have nothing
        records = gather(
            [part(third, SHARES[0])] * (rank == 0) + [part(second, SHARES[3]), local(first, *operands(1), call=1)] * (rank == 3),
            plan,
        )
    assert [(record.layer, record.call) for record in records] == [(first, 1), (third, 0), (second, 0)]
    same(records[1], whole(third, SHARES[0]))
    with collectives(USUAL):  # now known to all, whoever has it
        records = gather([part(second, SHARES[rank])] * (rank == 1), plan)
    same_all(records, [whole(second, SHARES[1])])
    with collectives(USUAL):
        assert gather([], plan) == ()


def case_nobody_has_anything() -> None:
    plan = Plan(Decoder())
    with collectives(USUAL):
        assert gather([], plan) == ()


def case_stages_of_a_pipeline_hold_different_layers() -> None:
    rank = dist.get_rank()
    here = {0: (0, 1, 10), 1: (2, 3, 11), 2: (4, 5), 3: (6, 9)}[rank]
    stage = nn.ModuleDict({"layers": nn.ModuleDict({str(i): Block() for i in here})})
    plan = Plan(stage)
    for counted in (CHANGED, USUAL):
        with collectives(counted):
            records = gather([whole(f"layers.{i}.attention") for i in here], plan)
        same_all(records, [whole(f"layers.{i}.attention") for i in (0, 1, 2, 3, 4, 5, 6, 9, 10, 11)])


def case_heads_that_differ_are_refused_on_every_rank() -> None:
    plan, rank = Plan(Decoder()), dist.get_rank()
    heads = slice(0, 3 if rank == 2 else 2)
    with pytest.raises(ArgumentError, match=r"2 heads of 'layers.0.attention' on rank 0 and 3 on rank 2"):
        gather([part(NAMES[0], slice(None), heads)], plan)


def case_heads_may_change_everywhere() -> None:
    plan, share = Plan(Decoder()), SHARES[dist.get_rank()]
    gather([part(NAMES[0], share)], plan)
    with collectives(CHANGED):
        records = gather([part(NAMES[0], share, slice(0, 5))], plan)
    same_all(records, [part(NAMES[0], slice(None), slice(0, 5))])


def grid() -> tuple[DeviceMesh, int, int]:
    """Two data-parallel ranks times two tensor-parallel ones, and this rank's place."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    return mesh, mesh.get_local_rank("data"), mesh.get_local_rank("tensor")


BATCHES = (slice(0, 4), slice(4, 7))


def case_heads_sharded_over_a_group_that_is_named() -> None:
    mesh, data, tensor = grid()
    heads = (slice(0, 4), slice(4, 6))[tensor]  # uneven
    for told in (mesh["tensor"], mesh.get_group("tensor")):
        plan = Plan(Decoder(), tensor_parallel=told, replicated=["layers.1.*"])
        for counted in (CHANGED, USUAL):
            with collectives(counted):
                records = gather([part(NAMES[0], BATCHES[data], heads), part(NAMES[1], BATCHES[data])], plan)
            same_all(records, [whole(name) for name in NAMES])
    assert shards(Decoder(), NAMES[:1], mesh["tensor"])[NAMES[0]] == HeadShard(tensor, 2)


def case_what_is_named_must_be_a_group_with_this_process() -> None:
    rank = dist.get_rank()
    mesh, *_ = grid()
    expected = r"a process group, or a DeviceMesh of one dimension"
    with pytest.raises(ArgumentError, match=f"tensor_parallel: got a DeviceMesh of 2 dimensions; expected {expected}"):
        shards(Decoder(), NAMES, mesh)
    with pytest.raises(ArgumentError, match=f"tensor_parallel: got str; expected {expected}"):
        shards(Decoder(), NAMES, "tensor")
    group = dist.new_group([0, 1])
    # One rank's mistake is everybody's error: nobody waits.
    plan = Plan(Decoder(), tensor_parallel=0 if rank == 3 else None)
    with pytest.raises(ArgumentError, match=r"tensor_parallel: got int"):
        gather([whole(NAMES[0])], plan)
    if rank > 1:
        with pytest.raises(ArgumentError, match=r"group: got a process group without this process"):
            gather([], Plan(Decoder(), group=group))


def case_a_group_without_the_other_heads_is_refused() -> None:
    mesh, data, tensor = grid()
    plan = Plan(Decoder(), group=mesh.get_group("data"), tensor_parallel=mesh["tensor"])
    with pytest.raises(
        ArgumentError, match=rf"group: got one without part {1 - tensor} of the 2 over which the heads of 'layers.0"
    ):
        gather([part(NAMES[0], BATCHES[data], slice(0, 3))], plan)


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, attention: bool = True) -> nn.Module:
    styles = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
    if attention:
        styles |= {f"layers.*.attention.{name}_proj": ColwiseParallel() for name in "qk"}
        styles |= {"layers.*.attention.o_proj": RowwiseParallel()}
    return parallelize_module(model, mesh, styles)


def case_sharded_heads_are_found_in_the_weights() -> None:
    mesh, data, tensor = grid()
    sharded, replicated = HeadShard(tensor, 2), HeadShard(counted=tensor == 0)
    model = tensor_parallel(Decoder(), mesh["tensor"])
    assert set(shards(model, NAMES).values()) == {sharded}
    records = gather([part(name, BATCHES[data], (slice(0, 3), slice(3, 6))[tensor]) for name in NAMES], Plan(model))
    same_all(records, [whole(name) for name in NAMES])

    model = tensor_parallel(Decoder(), mesh["tensor"], attention=False)  # only the layers in between are sharded
    assert set(shards(model, NAMES).values()) == {replicated}
    records = gather([part(name, BATCHES[data]) for name in NAMES], Plan(model))
    same_all(records, [whole(name) for name in NAMES])
    assert set(shards(model, NAMES, mesh["tensor"]).values()) == {replicated}  # the weights know it better


def case_fsdp_is_told_from_tensor_parallelism() -> None:
    mesh, _, tensor = grid()
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("data",))

    def split(model: nn.Module, over: DeviceMesh) -> nn.Module:
        for block in model.layers:
            fully_shard(block, mesh=over)
        return fully_shard(model, mesh=over)

    assert set(shards(split(Decoder(), line), NAMES).values()) == {HeadShard()}
    assert set(shards(split(Decoder(), both), NAMES).values()) == {HeadShard()}
    model = split(tensor_parallel(Decoder(), mesh["tensor"]), mesh["data"])
    assert set(shards(model, NAMES).values()) == {HeadShard(tensor, 2)}
    for module in (*model.layers, model):  # a step may leave the parameters together
        module.unshard()
    assert set(shards(model, NAMES).values()) == {HeadShard(tensor, 2)}
    model = split(tensor_parallel(Decoder(), mesh["tensor"], attention=False), mesh["data"])
    assert set(shards(model, NAMES).values()) == {HeadShard(counted=tensor == 0)}


def case_maxima_alone() -> None:
    plan, rank = Plan(Decoder()), dist.get_rank()
    mine = {(name, 0): part(name, SHARES[rank]).scaled_max for name in NAMES[: 1 + (rank == 3)]}
    for counted in ({"all_reduce": 2, "all_gather_object": 1}, {"all_reduce": 1, "all_gather_object": 0}):
        with collectives(counted):
            found = gather_maxima(mine, plan)
        assert list(found) == list(NAMES)
        assert torch.equal(found[NAMES[0]], whole(NAMES[0]).scaled_max)
        assert torch.equal(found[NAMES[1]], part(NAMES[1], SHARES[3]).scaled_max)
    with collectives({"all_reduce": 1, "all_gather_object": 0}):
        found = gather_maxima({}, plan)
    assert torch.equal(found[NAMES[1]], torch.full((HEADS,), -torch.inf, dtype=torch.float64))
    with collectives({"all_reduce": 2, "all_gather_object": 0}):  # the same plan serves a step
        gather([part(NAMES[0], SHARES[rank])], plan)
    found = gather_maxima({(NAMES[0], 0): torch.full((HEADS,), torch.nan if rank else 3.0, dtype=torch.float64)}, plan)
    assert torch.equal(found[NAMES[0]], torch.full((HEADS,), torch.inf, dtype=torch.float64))
