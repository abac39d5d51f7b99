"""Ring attention: the parts of several processes make up attention over the whole sequence."""

import sys

import pytest
import torch

from attemper import attention
from attemper.errors import ArgumentError
from attemper.nn import ring_attention, ring_shard
from attemper.nn.sequence_parts import Run, runs
from tests.attention_cases import tensors
from tests.nn import ring_cases as cases
from tests.processes import on_processes
from tests.running import run

test_on_four_processes = pytest.mark.slow(on_processes(cases, 4))


def test_alone_it_is_attention() -> None:
    query, key, value = tensors(2, 3, 11, 5)
    for layout in ("contiguous", "zigzag"):
        output = ring_attention(query, key, value, is_causal=True, layout=layout)
        torch.testing.assert_close(output, attention(query, key, value, is_causal=True), rtol=1e-6, atol=1e-6)


def test_each_position_lies_on_one_rank() -> None:
    for lengths, layout in (
        ([3, 0, 7], "contiguous"),
        ([0, 0], "contiguous"),
        ([5, 5, 4], "zigzag"),
        ([1, 1, 2], "zigzag"),
        ([0], "zigzag"),
    ):
        found = runs(lengths, layout)
        assert [sum(run.length for run in own) for own in found] == lengths
        positions = [place for own in found for run in own for place in range(run.start, run.start + run.length)]
        assert sorted(positions) == list(range(sum(lengths)))
    assert runs([5, 5, 4], "zigzag")[1] == (Run(3, 3, 0), Run(10, 2, 3))


def test_what_does_not_fit_is_refused() -> None:
    query, key, value = tensors(2, 3, 11, 5)
    with pytest.raises(ArgumentError, match=r"layout: got 'striped'; expected one of 'contiguous', 'zigzag'"):
        ring_attention(query, key, value, layout="striped")
    with pytest.raises(ArgumentError, match=r"layout: got 'striped'; expected one of 'contiguous', 'zigzag'"):
        ring_shard(query, layout="striped")
    with pytest.raises(ArgumentError, match=r"value: got NoneType; expected a torch.Tensor"):
        ring_attention(query, key, None)


@pytest.mark.slow
def test_the_example_runs_on_two_processes() -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    printed = run(sys.executable, *launch, "examples/ring_attention.py")
    assert printed == "2 processes, 511 of 1021 positions on the first: the same as on one\n"
