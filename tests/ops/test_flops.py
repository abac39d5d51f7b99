"""`FlopCounterMode` counts an attention as it counts torch's own, forward and backward, whatever is hidden."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from attemper import attention
from attemper.ops import row_stats
from tests.attention_cases import IMPLEMENTATIONS


def counted(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def tensors(heads: int = 3, **options: Any) -> list[Tensor]:
    shapes = ((2, 3, 5, 8), (2, heads, 7, 8), (2, heads, 7, 16))
    return [torch.ones(shape, requires_grad=True, **options) for shape in shapes]


def theirs(*, backward: bool) -> int:
    # The operator by which torch counts its own: its kernel for CPUs has no formula.
    def call() -> None:
        output = torch.ops.aten._scaled_dot_product_efficient_attention(*tensors(device="meta"), None, True)[0]
        if backward:
            output.sum().backward()

    return counted(call)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"return_stats": True}, {"window": (1, 1), "softcap": 5.0}],
    ids=["plain", "causal", "statistics", "window"],
)
def test_the_count_is_that_of_torchs_own(options: dict[str, Any], impl: str) -> None:
    def call(*leaves: Tensor) -> Tensor:
        found = attention(*leaves, **options, impl=impl)
        return found[0] if isinstance(found, tuple) else found

    forward, both = theirs(backward=False), theirs(backward=True)
    assert 0 < forward < both
    assert counted(lambda: call(*tensors())) == forward
    assert counted(lambda: call(*(x.detach() for x in tensors()))) == forward
    assert counted(lambda: call(*tensors()).sum().backward()) == both
    output = call(*tensors())  # past the dispatcher, which the backward pass then is not
    assert counted(lambda: output.sum().backward()) == both - forward


def test_grouped_heads_count_by_query() -> None:
    assert counted(lambda: attention(*tensors(heads=1), enable_gqa=True)) == theirs(backward=False)


def test_statistics_alone_are_one_product_of_the_two() -> None:
    query, key, _ = tensors()
    assert counted(lambda: row_stats(query, key)) == theirs(backward=False) * 8 // (8 + 16)


def test_under_a_transform() -> None:
    def loss(query: Tensor) -> Tensor:
        return attention(query, *(x.detach() for x in tensors()[1:])).sum()

    assert counted(lambda: torch.func.grad(loss)(tensors()[0].detach())) == theirs(backward=True)


def test_a_formula_of_the_user_goes_first() -> None:
    mapping = {torch.ops.attemper.forward: lambda *_, out_shape, **__: 11}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        attention(*tensors())
    assert counter.get_total_flops() == 11
