"""The Triton kernels under torch.compile: one graph with our operators in it, and the numbers of eager mode."""

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

from attemper import attention
from attemper.ops import row_stats
from tests.attention_cases import flowing


@pytest.fixture(autouse=True)
def _afresh() -> None:
    torch._dynamo.reset()


def tensors() -> dict[str, Tensor]:
    made = {"query": torch.randn(1, 4, 5, 7), "key": torch.randn(1, 2, 11, 7), "value": torch.randn(1, 2, 11, 3)}
    made |= {"scale": torch.rand(4), "sinks": torch.randn(4), "attn_mask": torch.randn(4, 5, 11)}
    return {name: each.requires_grad_() for name, each in made.items()}


def run(**given: Tensor) -> Any:
    output, rows = attention(
        **given, enable_gqa=True, is_causal=True, offset=6, softcap=3.0, dropout_p=0.2, return_stats=True, impl="triton"
    )
    return output, rows.lse, rows.entropy, rows.rest


def everything(function: Any, given: dict[str, Tensor]) -> list[Tensor]:
    torch.manual_seed(5)
    found = function(**given)
    roots = list(found[:3])
    return [*found, *torch.autograd.grad(roots, list(given.values()), flowing(*roots))]


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
def test_one_graph_gives_what_eager_mode_gives(dynamic: bool) -> None:
    given, counter = tensors(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, fullgraph=True, backend=counter, dynamic=dynamic)
    for ours, eager in zip(everything(compiled, given), everything(run, given), strict=True):
        assert torch.equal(ours, eager)
    assert counter.frame_count == 1


def test_the_graphs_hold_our_operators_and_no_kernel_is_looked_into() -> None:
    graphs = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    compiled = torch.compile(run, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    everything(compiled, tensors())
    forward, backward = ([str(node.target) for node in graph.graph.nodes if "attemper" in str(node.target)] for graph in graphs)
    assert forward == ["attemper.forward.default"]
    assert backward == ["attemper.backward.default"]


def test_the_statistics_alone() -> None:
    given = tensors()
    query, key = given["query"].detach(), given["key"].detach()

    def rows(query: Tensor, key: Tensor) -> Tensor:
        return row_stats(query, key, is_causal=True, offset=6, row_stride=2, impl="triton").rest

    compiled = torch.compile(rows, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(query, key), rows(query, key))
