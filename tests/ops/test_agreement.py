"""Every kernel against a plain definition in float64: output, each gradient, each statistic, within the error budget."""

import pytest
import torch

from attemper import attention
from tests.attention_cases import CASES, STATISTICS, Budget, Case, Problem, build, gradients_of, plain

IMPLEMENTATIONS = ("reference", "blocked")


def ours(problem: Problem, impl: str) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    output, rows = attention(problem.query, problem.key, problem.value, **problem.arguments, return_stats=True, impl=impl)
    statistics = {name: getattr(rows, name) for name in STATISTICS}
    return output, statistics, gradients_of(problem, output, rows.lse, rows.entropy)


def expected(problem: Problem) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    output, statistics = plain(problem)
    return output, statistics, gradients_of(problem, output, statistics["lse"], statistics["entropy"])


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_the_definition(case: Case, dtype: torch.dtype, impl: str) -> None:
    budget = Budget()
    for seed in case.seeds():
        _compare(build(case, dtype, seed), impl, budget)
    budget.check()


def _compare(problem: Problem, impl: str, budget: Budget) -> None:
    dtype = problem.query.dtype
    output, statistics, gradients = ours(problem, impl)
    true_output, true_statistics, true_gradients = expected(problem.to(torch.float64))
    # The peer computes as we promise to: in float32 on 16-bit inputs.
    peer = torch.float64 if dtype == torch.float64 else torch.float32
    peer_output, peer_statistics, peer_gradients = expected(problem.to(peer))
    if dtype == torch.float64:
        peer_output, peer_statistics, peer_gradients = (_shaken(x) for x in (peer_output, peer_statistics, peer_gradients))

    assert output.dtype == dtype
    budget.add("output", output, true_output, peer_output)
    assert torch.equal(statistics.pop("count"), true_statistics["count"])
    # Rounding may exchange two keys that are all but equal; the logit found must then be the largest within the budget.
    argmax = statistics.pop("argmax")
    assert torch.equal(argmax == -1, true_statistics["count"] == 0)
    found = true_statistics["logits"].gather(-1, argmax.clamp(min=0).unsqueeze(-1)).squeeze(-1).to(peer)
    budget.add("logit at argmax", found, true_statistics["max"], peer_statistics["max"])
    for name, actual in statistics.items():
        assert actual.dtype == peer
        budget.add(name, actual, true_statistics[name], peer_statistics[name])
    for name, gradient in gradients.items():
        assert gradient.dtype == problem.leaves()[name].dtype
        budget.add(f"gradient of {name}", gradient, true_gradients[name], peer_gradients[name])


def _shaken(oracle: object) -> object:
    """In float64 the oracle is its own peer; allow it what rounding may do to a sum of some hundreds of terms."""
    if isinstance(oracle, dict):
        return {name: _shaken(tensor) for name, tensor in oracle.items()}
    assert isinstance(oracle, torch.Tensor)
    return oracle if not oracle.is_floating_point() else oracle * (1.0 + 1e-13)
