"""Every kernel against a plain definition in float64: output, each gradient, each statistic, within the error budget."""

import pytest
import torch

from attemper import attention
from tests.attention_agreement import Results, compare
from tests.attention_cases import CASES, IMPLEMENTATIONS, STATISTICS, Budget, Case, Problem, build, gradients_of


def ours(problem: Problem, impl: str) -> Results:
    output, rows = attention(problem.query, problem.key, problem.value, **problem.arguments, return_stats=True, impl=impl)
    statistics = {name: getattr(rows, name) for name in STATISTICS}
    return output, statistics, gradients_of(problem, output, rows.lse, rows.entropy)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_the_definition(case: Case, dtype: torch.dtype, impl: str) -> None:
    budget = Budget()
    for seed in case.seeds():
        problem = build(case, dtype, seed)
        compare(problem, ours(problem, impl), budget)
    budget.check()
