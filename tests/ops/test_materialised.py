"""Attention with its weights written down: what `attention` gives, and the weights that did it."""

import torch
from torch import Tensor

from attemper import attention, scales
from attemper.ops import attention_with_weights
from tests.attention_cases import CASES, build


def test_it_is_attention_and_the_weights_that_met_the_values() -> None:
    for case in CASES:
        problem = build(case, torch.float64)
        given = (problem.query, problem.key, problem.value)
        expected, record = attention(*given, **problem.arguments, return_stats=True, impl="reference")
        output, weights, rows = attention_with_weights(*given, **problem.arguments)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(rows.rest, record.rest, equal_nan=True)
        assert weights.shape == (case.batch, case.heads, case.queries, case.keys)
        groups = case.heads // case.kv_heads if case.kv_heads else 1
        torch.testing.assert_close(weights @ problem.value.repeat_interleave(groups, 1), output)


def test_it_takes_rules_leading_dimensions_and_16_bits() -> None:
    query, key, value = (torch.randn(2, 3, 5, 7, 11) for _ in range(3))
    rule = scales.LogLength(5, initial=0.7)
    output, weights, rows = attention_with_weights(query, key, value, scale=rule, is_causal=True, offset=2)
    torch.testing.assert_close(output, attention(query, key, value, scale=rule, is_causal=True, offset=2))
    assert weights.shape == (2, 3, 5, 7, 7)
    assert rows.lse.shape == (2, 3, 5, 7)

    def half(tensor: Tensor) -> Tensor:
        return tensor.bfloat16()

    output, weights, rows = attention_with_weights(half(query), half(key), half(value))
    assert output.dtype == weights.dtype == torch.bfloat16
    assert rows.lse.dtype == torch.float32
