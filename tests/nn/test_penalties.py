"""The penalties and their gradients, against float64 with every weight written down; and what is left out of them."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import attemper
from attemper.errors import ArgumentError
from attemper.nn import entropy_floor, z_loss
from attemper.stats import RowStats
from tests.attention_cases import CASES, Budget, Case, Problem, build, every_implementation, plain

CHOSEN = ("no keys, sinks", "one key", "grouped, masked", "causal, rows without keys", "float mask", "scale: per head")
CHOSEN += ("scale: per query, softcap", "sinks, empty rows", "everything", "sharp", "common offset")


def query_mask(case: Case) -> Tensor:
    return (
        torch.arange(case.queries).expand(case.batch, -1)
        < torch.tensor([[case.queries], [max(case.queries - 4, 1)]])[: case.batch]
    )


def head_weights(case: Case) -> Tensor:
    return torch.arange(1, case.heads + 1) / 8


def written_down(case: Case, statistics: dict[str, Tensor], normalized: bool, draw: int = 0) -> tuple[Tensor, Tensor]:
    """Both penalties by a plain definition, the rows added up in an order that is drawn."""
    lse, entropy, count = statistics["lse"], statistics["entropy"], statistics["count"]
    kept = (count > 1) & query_mask(case)[:, None]
    if not kept.any():
        return lse.new_zeros(()), lse.new_zeros(())
    weights = head_weights(case).to(lse).reshape(-1, 1).expand(lse.shape)[kept]
    lse, entropy, count = lse[kept], entropy[kept], count[kept].to(lse) + case.sinks
    order = torch.randperm(len(lse), generator=torch.Generator().manual_seed(draw))
    lse, entropy, count, weights = (each[order] for each in (lse, entropy, count, weights))
    low = 0.95 - entropy / count.log() if normalized else 3.5 - entropy
    return (weights * lse**2).mean(), (weights * low.clamp(min=0.0) ** 2).mean()


def ours(problem: Problem, case: Case, impl: str, normalized: bool) -> tuple[Tensor, Tensor]:
    _, rows = attemper.attention(problem.query, problem.key, problem.value, **problem.arguments, return_stats=True, impl=impl)
    options: dict[str, Any] = {"query_mask": query_mask(case), "head_weights": head_weights(case)}
    floor = entropy_floor(rows, 0.95 if normalized else 3.5, **options, normalized=normalized)
    return z_loss(rows, **options), floor


def gradients(problem: Problem, penalty: Tensor) -> dict[str, Tensor]:
    leaves = problem.leaves()
    if not penalty.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    found = torch.autograd.grad(penalty, list(leaves.values()), allow_unused=True, materialize_grads=True, retain_graph=True)
    return dict(zip(leaves, found, strict=True))


@every_implementation
@pytest.mark.parametrize("name", CHOSEN)
def test_values_and_gradients(name: str, impl: str) -> None:
    (case,) = [each for each in CASES if each.name == name]
    budget = Budget()
    for seed in case.seeds()[:5]:
        exact, single = build(case, torch.float64, seed), build(case, torch.float32, seed)
        orders = [torch.randperm(case.width, generator=torch.Generator().manual_seed(draw)) for draw in range(3)]
        for normalized in (True, False):
            oracle = written_down(case, plain(exact)[1], normalized)
            peers = [(each := single.reordered(order), written_down(case, plain(each)[1], normalized)) for order in orders]
            for which, (penalty, true) in enumerate(zip(ours(single, case, impl, normalized), oracle, strict=True)):
                what = f"{('z_loss', 'entropy_floor')[which]} {normalized}"
                assert penalty.dtype == torch.float32
                budget.add(what, penalty, true, *(found[which] for _, found in peers))
                true_gradients = gradients(exact, true)
                theirs = [(gradients(each, found[which]), order) for (each, found), order in zip(peers, orders, strict=True)]
                for leaf, gradient in gradients(single, penalty).items():
                    turned = leaf in ("query", "key")
                    rest = (given[leaf][..., torch.argsort(order)] if turned else given[leaf] for given, order in theirs)
                    budget.add(f"gradient of {leaf} by {what}", gradient, true_gradients[leaf], *rest)
    budget.check()


def rows_of(*shape: int) -> RowStats:
    torch.manual_seed(2)
    return RowStats.from_logits(torch.randn(*shape, dtype=torch.float64, requires_grad=True) * 3.0)


def test_by_hand() -> None:
    rows = RowStats.from_logits(torch.tensor([[[0.0, 0.0], [math.log(3.0), 0.0]]], dtype=torch.float64))
    assert float(z_loss(rows)) == pytest.approx((math.log(2.0) ** 2 + math.log(4.0) ** 2) / 2)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert float(entropy_floor(rows, 0.9)) == pytest.approx((0.9 - entropy / math.log(2.0)) ** 2 / 2)
    assert float(entropy_floor(rows, 0.6, normalized=False)) == pytest.approx((0.6 - entropy) ** 2 / 2)
    assert float(entropy_floor(rows, 0.8)) == 0.0  # both rows are above it
    assert float(z_loss(rows, head_weights=torch.tensor([4.0]))) == pytest.approx(4.0 * float(z_loss(rows)))


def test_rows_that_say_nothing_are_left_out() -> None:
    logits = torch.randn(2, 3, 5, 7, dtype=torch.float64, requires_grad=True)
    visible = torch.ones(5, 7, dtype=torch.bool)
    visible[1], visible[3, 1:] = False, False
    mask = torch.tensor([[True, True, True, True, False], [True] * 5])
    rows = RowStats.from_logits(logits, visible)
    kept = RowStats.from_logits(torch.cat([logits[0, :, [0, 2]], logits[1, :, [0, 2, 4]]], 1))
    for found, expected in ((z_loss(rows, mask), z_loss(kept)), (entropy_floor(rows, 0.9, mask), entropy_floor(kept, 0.9))):
        torch.testing.assert_close(found, expected)
        (gradient,) = torch.autograd.grad(found, logits, retain_graph=True)
        assert gradient[:, :, [0, 2]].abs().sum() > 0
        assert not gradient[:, :, [1, 3]].any()
        assert not gradient[0, :, 4].any()
    nothing = RowStats.empty((2, 3, 5))
    assert float(z_loss(nothing)) == float(entropy_floor(nothing, 0.5)) == 0.0


def test_no_matrix_of_weights_is_written_down() -> None:
    """4096 × 4096 logits in float32 are 64 MiB a head; the penalties and their gradient take less than 1 MiB beside q, k, v."""
    query, key, value = (torch.randn(1, 4096, 8).requires_grad_() for _ in range(3))
    sizes: list[int] = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            sizes.extend(each.numel() for each in torch.utils._pytree.tree_leaves(result) if isinstance(each, Tensor))
            return result

    with Sizes():
        _, rows = attemper.attention(query, key, value, is_causal=True, return_stats=True)
        (z_loss(rows) + entropy_floor(rows, 0.9)).backward()
    assert query.grad is not None
    assert query.grad.abs().sum() > 0
    assert max(sizes) <= 4096 * 8 * 2


def test_arguments_that_do_not_fit() -> None:
    rows = rows_of(2, 3, 5, 7)
    with pytest.raises(ArgumentError, match=r"rows: got Tensor; expected the RowStats"):
        z_loss(rows.lse)  # pyrefly: ignore
    with pytest.raises(ArgumentError, match=r"query_mask: got torch.float32 of shape \(2, 5\); expected bool"):
        z_loss(rows, torch.ones(2, 5))
    with pytest.raises(ArgumentError, match=r"query_mask: got torch.bool of shape \(2, 4\)"):
        entropy_floor(rows, 0.1, torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ArgumentError, match=r"head_weights: got \[2\]; expected a tensor \[heads\] with 3 heads"):
        z_loss(rows, head_weights=torch.ones(2))
    with pytest.raises(ArgumentError, match=r"head_weights: got list"):
        z_loss(rows, head_weights=[1.0, 1.0, 1.0])  # pyrefly: ignore
    for floor in (-0.1, 1.5, math.nan, math.inf, True):
        with pytest.raises(ArgumentError, match=rf"floor: got {floor}; expected a number in \[0, 1\]"):
            entropy_floor(rows, floor)
    with pytest.raises(ArgumentError, match=r"floor: got inf; expected a finite number from 0 on, in nats"):
        entropy_floor(rows, math.inf, normalized=False)
