"""Every kernel against a plain definition in float64: output, each gradient, each statistic, within the error budget."""

import pytest
import torch

from tests.attention_agreement import attemper_gives, compare
from tests.attention_cases import CASES, IMPLEMENTATIONS, Budget, Case, build


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_the_definition(case: Case, dtype: torch.dtype, impl: str) -> None:
    budget = Budget()
    for seed in case.seeds():
        problem = build(case, dtype, seed)
        compare(problem, attemper_gives(problem, impl), budget)
    budget.check()
