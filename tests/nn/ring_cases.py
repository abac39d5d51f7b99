"""Ring attention on four processes: joined together, the parts of all ranks are the whole within the error budget."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from attemper import RowStats, attention, scales
from attemper.errors import ArgumentError
from attemper.nn import ring_attention, ring_shard
from tests.attention_agreement import Results, attemper_gives, compare
from tests.attention_cases import CASES, STATISTICS, Budget, Case, Problem, build, flowing

GROUPS: dict[int, dist.ProcessGroup] = {}


def case_groups_are_made() -> None:
    GROUPS.update({size: dist.new_group(list(range(size))) for size in (2, 3, 4)})


def cut(length: int, size: int, layout: str) -> list[Tensor]:
    """The positions of each rank: uneven pieces, one of them empty where there are three; or as `ring_shard` cuts them."""
    whole = torch.arange(length)
    if layout == "zigzag":
        pieces = whole.tensor_split(2 * size)
        return [torch.cat([pieces[rank], pieces[2 * size - 1 - rank]]) for rank in range(size)]
    ends = {2: [0.4], 3: [0.3, 0.3], 4: [0.1, 0.2, 0.7]}[size]
    return list(whole.tensor_split([int(end * length) for end in ends]))


def by_parts(problem: Problem, size: int, layout: str, impl: str) -> Results:
    """What ring attention gives, put together on every rank of the group from the parts of all."""
    group, rank = GROUPS[size], dist.get_rank()
    queries, keys = (cut(tensor.shape[-2], size, layout) for tensor in (problem.query, problem.key))
    arguments = {name: thing for name, thing in problem.arguments.items() if name != "attn_mask"}
    shared = {name: leaf.detach().requires_grad_() for name, leaf in problem.leaves().items() if name in ("scale", "sinks")}
    arguments |= shared
    if isinstance(arguments["scale"], Tensor) and arguments["scale"].ndim > 1:
        arguments["scale"] = arguments["scale"][..., queries[rank]]
    query, key, value = (
        tensor.detach()[..., positions[rank], :].requires_grad_()
        for tensor, positions in ((problem.query, queries), (problem.key, keys), (problem.value, keys))
    )
    output, rows = ring_attention(query, key, value, **arguments, layout=layout, group=group, impl=impl, return_stats=True)
    shape = problem.query.shape[:-1]
    whole = (torch.empty(*shape, value.shape[-1], dtype=output.dtype), *(torch.empty(shape, dtype=rows.lse.dtype) for _ in "le"))
    into_output, into_lse, into_entropy = flowing(*whole)
    here = queries[rank]
    gradients = torch.autograd.grad(
        [output, rows.lse, rows.entropy],
        [query, key, value, *shared.values()],
        [into_output[..., here, :], into_lse[..., here], into_entropy[..., here]],
    )
    mine: list[Any] = [output.detach(), *(getattr(rows, name).detach() for name in STATISTICS), *gradients]
    everybody: list[Any] = [None] * size
    dist.all_gather_object(everybody, mine, group=group)
    columns = list(zip(*everybody, strict=True))
    joined = [put_together(columns[0], queries, -2)]
    joined += [put_together(column, queries, -1) for column in columns[1 : 1 + len(STATISTICS)]]
    of_parts = columns[1 + len(STATISTICS) :]
    names = ["query", "key", "value", *shared]
    joined += [put_together(column, places, -2) for column, places in zip(of_parts[:3], (queries, keys, keys), strict=True)]
    joined += [torch.stack(column).double().sum(0).to(column[0].dtype) for column in of_parts[3:]]
    statistics = dict(zip(STATISTICS, joined[1 : 1 + len(STATISTICS)], strict=True))
    by_name = dict(zip(names, joined[1 + len(STATISTICS) :], strict=True))
    return joined[0], statistics, {name: by_name[name] for name in problem.leaves()}


def put_together(parts: tuple[Tensor, ...], places: list[Tensor], dim: int) -> Tensor:
    """The whole from the parts and the positions that each of them holds."""
    return torch.cat(parts, dim).index_select(dim, torch.cat(places).argsort())


def agrees(case: Case, size: int, layout: str, dtype: torch.dtype, impl: str = "auto") -> None:
    rank, budget = dist.get_rank(), Budget()
    for seed in range(5, 11) if rank < size else ():
        problem = build(case, dtype, seed)
        results = by_parts(problem, size, layout, impl)
        if rank == seed % size:  # each draw is judged on one rank
            compare(problem, results, budget, also=attemper_gives)  # one process, which it is to equal
    budgets: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(budgets, budget)
    for other in budgets:
        budget.join(other)
    try:
        budget.check()
    except AssertionError as error:
        raise AssertionError(f"{case.name}, {size} ranks, {layout}, {dtype}, {impl}: {error}") from None


WITHOUT_MASK = [case for case in CASES if case.mask is None]


def case_two_ranks() -> None:
    for case in WITHOUT_MASK[::3]:
        agrees(case, 2, "contiguous", torch.float32)


def case_three_ranks_of_which_one_has_nothing() -> None:
    for case in WITHOUT_MASK[1::3]:
        agrees(case, 3, "contiguous", torch.float32)


def case_four_ranks() -> None:
    for case in WITHOUT_MASK[2::3]:
        agrees(case, 4, "contiguous", torch.float32)


def case_zigzag() -> None:
    for number, case in enumerate(case for case in WITHOUT_MASK if case.is_causal or case.window or case.sinks):
        agrees(case, (2, 3, 4)[number % 3], "zigzag", torch.float32)


EVERYTHING = Case("everything", 2, 6, 2, 29, 41, 13, 7, 2.0, None, "query", 3.0, True, True, (17, 4), 9)


def case_every_precision_and_kernel() -> None:
    for number, dtype in enumerate((torch.bfloat16, torch.float16, torch.float64)):
        agrees(EVERYTHING, 2 + number, "zigzag", dtype)
        agrees(EVERYTHING, 4 - number, "contiguous", dtype)
    for impl in ("reference", "blocked"):
        agrees(EVERYTHING, 4, "zigzag", torch.float32, impl)
        agrees(EVERYTHING, 3, "contiguous", torch.bfloat16, impl)


def case_extremes_are_those_of_one_process_to_the_bit() -> None:
    """Where each part has enough queries that the kernel takes the same way as for the whole."""
    case, rank = (
        Case("long", 2, 6, 2, 97, 101, 13, 7, is_causal=True, scale="query", window=(60, None), offset=3),
        dist.get_rank(),
    )
    for dtype in (torch.float32, torch.float64):
        problem = build(case, dtype)
        _, expected, _ = attemper_gives(problem)
        for size, layout in ((2, "contiguous"), (3, "zigzag"), (4, "contiguous"), (4, "zigzag")):
            if rank < size:
                _, found, _ = by_parts(problem, size, layout, "auto")
                for name in ("count", "max", "min", "argmax", "product_max", "product_min"):
                    assert torch.equal(found[name], expected[name]), f"{name}, {size} ranks, {layout}, {dtype}"


def case_a_rule_is_asked_for_the_positions_of_the_rank() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    problem = build(Case("rule", queries=23, keys=31, is_causal=True, offset=8), torch.float64)
    for rule in (scales.LogLength(), scales.InverseSqrt(), scales.Llama4(length=4)):
        whole = attention(problem.query, problem.key, problem.value, is_causal=True, offset=8, scale=rule)
        for layout in ("contiguous", "zigzag"):
            queries, keys = (cut(tensor.shape[-2], size, layout)[rank] for tensor in (problem.query, problem.key))
            operands = (problem.query[..., queries, :], problem.key[..., keys, :], problem.value[..., keys, :])
            output = ring_attention(*operands, is_causal=True, offset=8, scale=rule, layout=layout)
            torch.testing.assert_close(output, whole[..., queries, :], rtol=1e-13, atol=1e-13)


def case_whoever_wants_a_gradient_gets_it() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    problem = build(Case("wanted", queries=13, keys=13, is_causal=True), torch.float64)
    query, key, value = (ring_shard(each.detach()) for each in (problem.query, problem.key, problem.value))
    key.requires_grad_(rank == 1)  # one rank's keys alone; every rank's queries send something back to them
    query.requires_grad_()
    lengths = [len(each) for each in torch.arange(13).tensor_split(size)]
    output = ring_attention(query, key, value, is_causal=True, lengths=lengths)
    output.sum().backward()
    attention(problem.query, problem.key, problem.value, is_causal=True).sum().backward()
    assert problem.query.grad is not None
    assert problem.key.grad is not None
    torch.testing.assert_close(query.grad, ring_shard(problem.query.grad), rtol=1e-12, atol=1e-12)
    assert value.grad is None
    if rank == 1:
        torch.testing.assert_close(key.grad, ring_shard(problem.key.grad), rtol=1e-12, atol=1e-12)
    else:
        assert key.grad is None


def case_a_second_derivative_is_refused() -> None:
    query, key, value = (torch.randn(1, 2, 3, 5, requires_grad=True) for _ in range(3))
    output = ring_attention(query, key, value)
    (gradient,) = torch.autograd.grad(output.square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def case_other_dimensions_in_front() -> None:
    query, key, value = torch.randn(3, 2, 2, 3, 11, 5, dtype=torch.float64)
    output, rows = ring_attention(*(ring_shard(each) for each in (query, key, value)), return_stats=True)
    whole, expected = attention(query, key, value, return_stats=True)
    torch.testing.assert_close(output, ring_shard(whole), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(rows.entropy, ring_shard(expected.entropy, -1), rtol=1e-13, atol=1e-13)
    assert isinstance(rows, RowStats)


def case_arguments_that_do_not_fit() -> None:
    rank = dist.get_rank()
    query = torch.randn(1, 2, 3 + rank, 5)
    with pytest.raises(
        ArgumentError, match=r"layout: got 'zigzag' with \[3, 4, 5, 6\] positions on the ranks; expected \[5, 5, 4, 4\]"
    ):
        ring_attention(query, query, query, layout="zigzag")
    with pytest.raises(ArgumentError, match=r"lengths: got \[3, 4\]; expected 4 numbers, one a rank"):
        ring_attention(query, query, query, lengths=[3, 4])
    if rank == 3:
        with pytest.raises(ArgumentError, match=r"lengths: got \[3, 4, 5, 7\]; .* of which number 3 is this rank's 6 queries"):
            ring_attention(query, query, query, lengths=[3, 4, 5, 7])
        with pytest.raises(ArgumentError, match="group: got a process group without this process"):
            ring_attention(query, query, query, group=GROUPS[2])
