"""What an implementation gives for a problem, compared with the plain definition in float64 within the error budget."""

from collections.abc import Callable

import torch
from torch import Tensor

from attemper import attention
from tests.attention_cases import STATISTICS, Budget, Problem, gradients_of, plain

ORDERS = 4  # of summation, in which the peer evaluates

Results = tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]  # output, statistics by name, gradients by name


def attemper_gives(problem: Problem, impl: str = "auto") -> Results:
    """What `attemper.attention` gives."""
    output, rows = attention(problem.query, problem.key, problem.value, **problem.arguments, return_stats=True, impl=impl)
    statistics = {name: getattr(rows, name) for name in STATISTICS}
    return output, statistics, gradients_of(problem, output, rows.lse, rows.entropy)


def compare(problem: Problem, results: Results, budget: Budget, also: Callable[[Problem], Results] | None = None) -> None:
    """Take into the budget what an implementation gave for a problem: its dtypes, counts and places are checked at once.

    Args:
        also: another peer, which is given the problem in the precision of the peers.
    """
    dtype = problem.query.dtype
    output, statistics, gradients = results
    true_output, true_statistics, true_gradients = expected(problem.to(torch.float64))
    # The peer computes as we promise to: in float32 on 16-bit inputs.
    peer = torch.float64 if dtype == torch.float64 else torch.float32
    peers = [_peer(problem.to(peer), order) for order in range(ORDERS)]
    peers += [] if also is None else [also(problem.to(peer))]

    assert output.dtype == dtype
    budget.add("output", output, true_output, *(output for output, _, _ in peers))
    statistics = dict(statistics)
    assert torch.equal(statistics.pop("count"), true_statistics["count"])
    # Rounding may exchange two keys that are all but equal; the logit found must then be the largest within the budget.
    argmax = statistics.pop("argmax")
    assert torch.equal(argmax == -1, true_statistics["count"] == 0)
    found = true_statistics["logits"].gather(-1, argmax.clamp(min=0).unsqueeze(-1)).squeeze(-1).to(peer)
    budget.add("logit at argmax", found, true_statistics["max"], *(statistics["max"] for _, statistics, _ in peers))
    for name, actual in statistics.items():
        assert actual.dtype == peer
        budget.add(name, actual, true_statistics[name], *(statistics[name] for _, statistics, _ in peers))
    for name, gradient in gradients.items():
        assert gradient.dtype == problem.leaves()[name].dtype
        theirs = (gradients[name] for _, _, gradients in peers)
        budget.add(f"gradient of {name}", gradient, true_gradients[name], *theirs)


def _peer(problem: Problem, number: int) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """What eager code gives, with the products added up in one of several orders."""
    width = problem.query.shape[-1]
    order = torch.randperm(width, generator=torch.Generator().manual_seed(number)) if number else torch.arange(width)
    output, statistics, gradients = expected(problem.reordered(order))
    for name in ("query", "key"):
        gradients[name] = gradients[name][..., order.argsort()]
    if problem.query.dtype == torch.float64:
        # The oracle is its own peer; it allows what rounding may do to a sum of some hundreds of terms.
        shake = 1.0 + 1e-13
        return output * shake, _times(statistics, shake), _times(gradients, shake)
    return output, statistics, gradients


def _times(tensors: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    return {name: tensor * factor if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def expected(problem: Problem) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    output, statistics = plain(problem)
    return output, statistics, gradients_of(problem, output, statistics["lse"], statistics["entropy"])
