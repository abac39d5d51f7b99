"""Histograms: every value lies in the bin that a search among the edges finds."""

import math

import pytest
import torch
from torch import Tensor

from attemper.stats import HISTOGRAM_EDGES
from attemper.stats.histograms import histogram


def on_and_beside_edges(edges: Tensor, dtype: torch.dtype) -> Tensor:
    rounded, up = edges.to(dtype), torch.tensor(math.inf, dtype=dtype)
    return torch.cat([rounded, torch.nextafter(rounded, up), torch.nextafter(rounded, -up)])


def anywhere(dtype: torch.dtype) -> Tensor:
    sizes = torch.exp(20.0 * torch.randn(30_011, dtype=dtype))
    ends = [0.0, -0.0, math.inf, -math.inf, torch.finfo(dtype).max, torch.finfo(dtype).tiny, -torch.finfo(dtype).tiny]
    return torch.cat([sizes, -sizes, torch.rand(30_011, dtype=dtype), torch.tensor(ends, dtype=dtype)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", HISTOGRAM_EDGES)
def test_each_value_lies_where_a_search_finds_it(name: str, dtype: torch.dtype) -> None:
    edges = HISTOGRAM_EDGES[name]
    values = torch.cat([on_and_beside_edges(edges, dtype), anywhere(dtype)])
    # As many heads as values, so that each one's bin shows.
    found = torch.cat([histogram(name, part[:, None], torch.ones(len(part), 1, dtype=torch.int64)) for part in values.split(997)])
    assert torch.equal(found.argmax(-1), torch.bucketize(values.double(), edges, right=True))
    assert found.sum(-1).unique().tolist() == [1]


@pytest.mark.parametrize("name", HISTOGRAM_EDGES)
def test_what_is_not_taken_counts_nowhere(name: str) -> None:
    values = torch.tensor([[math.nan, 0.5, math.inf, -math.inf, 0.25], [0.5, 0.5, -math.nan, 0.5, 0.5]])
    taken = torch.tensor([[0, 1, 0, 0, 0], [1, 1, 0, 1, 0]])
    found = histogram(name, values, taken)
    half = int(torch.bucketize(0.5, HISTOGRAM_EDGES[name], right=True))
    assert found.shape == (2, len(HISTOGRAM_EDGES[name]) + 1)
    assert found[:, half].tolist() == [1, 3]
    assert found.sum(-1).tolist() == [1, 3]
