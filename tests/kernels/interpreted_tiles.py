"""Every tile that a kernel may get on a GPU, under Triton's interpreter: results within the same error budget."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attemper import attention
from attemper.kernels.triton_backward import launching as of_backward
from attemper.kernels.triton_choices import ChoiceFile
from attemper.kernels.triton_forward import launching as of_forward
from attemper.kernels.triton_problem import Launch
from attemper.kernels.triton_tuning import Cut, Tuner, made_by
from tests.attention_agreement import attemper_gives, compare
from tests.attention_cases import Budget, Case, build


class Preferring(Tuner):
    """Chooses the candidate of a number, or the last, and remembers how many there were."""

    def __init__(self, number: int) -> None:
        super().__init__(wanted=lambda device: False)
        self.number, self.offered = number, 0

    def choose(
        self, candidates: Sequence[Cut], key: Callable[[], str], launches: Callable[[Cut], Sequence[Launch]], given: Tensor
    ) -> Cut:
        self.offered = max(self.offered, len(candidates))
        return candidates[min(self.number, len(candidates) - 1)]


CASES = (
    Case("causal", 1, 2, 1, 131, 137, 19, 11, is_causal=True, offset=6, scale="scalar"),
    Case("mask", 1, 1, 1, 67, 71, 67, 67, mask="bool", sinks=True),
)


def use(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (of_forward, of_backward):
        monkeypatch.setattr(module, "TUNER", tuner)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_tile_keeps_within_the_error_budget(case: Case, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = Preferring(number)
    use(tuner, monkeypatch)
    budget = Budget()
    problem = build(case, torch.float16)
    compare(problem, attemper_gives(problem, "triton"), budget)
    budget.check()
    assert tuner.offered > 1


def test_a_call_takes_what_was_found_fastest_and_timing_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[str] = []

    def timer(call: Callable[[], None]) -> float:
        call()
        timed.append("")
        return 1.0 / len(timed)  # the last is the fastest

    ours = Tuner(timer, lambda device: True, lambda given: False, lambda: tmp_path)
    problem = build(Case("causal", 1, 1, 1, 67, 71, 19, 11, is_causal=True), torch.float16)
    leaves = list(problem.leaves().values())

    def run() -> list[Tensor]:
        output = attention(*leaves, is_causal=True, impl="triton")
        return [output, *torch.autograd.grad(output, leaves, torch.ones_like(output))]

    use(ours, monkeypatch)
    first = run()
    kernels = {key.split()[0]: tile for key, tile in ChoiceFile(lambda: tmp_path, made_by("cpu")).read().items()}
    assert set(kernels) == {"attend", "query_gradients", "key_gradients"}
    count = len(timed)
    again = run()
    assert len(timed) == count
    use(Preferring(2), monkeypatch)
    for one, other, fixed in zip(first, again, run(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, fixed)


def test_a_call_has_one_tile_with_gradients_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([3.0, 2.0, 1.0, 1.0, 2.0, 3.0])  # if it were asked again it would find another tile
    ours = Tuner(lambda call: next(times), lambda device: True, lambda given: False, lambda: tmp_path)
    use(ours, monkeypatch)
    leaves = [torch.randn(1, 2, rows, 19, dtype=torch.float16).requires_grad_() for rows in (131, 137, 137)]
    with torch.no_grad():
        first = attention(*leaves, is_causal=True, impl="triton")
    again = attention(*leaves, is_causal=True, impl="triton")
    assert again.requires_grad
    assert next(times, None) == 1.0
    assert torch.equal(first, again)


@pytest.mark.parametrize(("forward", "backward"), [(0, 1), (1, 0)])
def test_dropout_keeps_the_same_weights_whatever_tile_each_direction_has(
    forward: int, backward: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = [torch.randn(1, 2, rows, 19, dtype=torch.float16).requires_grad_() for rows in (131, 137, 137)]
    offered = []

    def run(*numbers: int) -> list[Tensor]:
        for module, number in zip((of_forward, of_backward), numbers, strict=True):
            monkeypatch.setattr(module, "TUNER", Preferring(number))
        torch.manual_seed(5)
        output = attention(*leaves, dropout_p=0.5, impl="triton")
        found = [output, *torch.autograd.grad(output, leaves, torch.ones_like(output))]
        offered.extend(module.TUNER.offered for module in (of_forward, of_backward))
        return found

    for one, other in zip(run(forward, backward), run(0, 0), strict=True):
        torch.testing.assert_close(one, other, rtol=0.01, atol=0.01)
    assert min(offered) > 1
