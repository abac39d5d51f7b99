"""A slice of the fuzz target, and the target itself: it finds what is planted, and says how to bring it back."""

import sys
from dataclasses import replace

import pytest
import torch

from attemper.kernels import cpu
from tests.kernels import fuzz
from tests.kernels.random_problems import sample
from tests.running import run

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the kernel is not built here (CI insists on it)")


@pytest.mark.parametrize("part", range(5))
def test_random_problems(part: int) -> None:
    numbers = range(60 * part, 60 * (part + 1))
    found = {number: list(fuzz.faults(sample(0, number))) for number in numbers}
    assert not {f"--seed 0 --only {number}": faults for number, faults in found.items() if faults}


def test_a_problem_is_a_function_of_its_number() -> None:
    one, same, other = (sample(3, number) for number in (17, 17, 18))
    assert one.describe() == same.describe() != other.describe()
    assert torch.equal(one.problem.query.nan_to_num(), same.problem.query.nan_to_num())


@pytest.mark.parametrize("relative", [1e-4, -1e-4])
def test_a_small_error_in_one_number_is_found(relative: float) -> None:
    drawn = next(drawn for drawn in (sample(5, number) for number in range(200)) if _ordinary(drawn))
    truth = fuzz.Truth(drawn)
    ours = fuzz.results(drawn.problem, drawn, "cpu")
    assert not list(truth.faults_of(ours, fuzz.Tightness()))
    for name in ("output", "lse", "var", "gradient of query", "gradient of value"):
        spoilt = ours[name].clone()
        spoilt.view(-1)[spoilt.abs().argmax()] *= 1.0 + relative
        (fault,) = truth.faults_of(ours | {name: spoilt}, fuzz.Tightness())
        assert fault.startswith(f"{name}: 1 of {spoilt.numel()} numbers off"), fault


def _ordinary(drawn: fuzz.Sample) -> bool:
    problem = drawn.problem
    finite = all(
        torch.isfinite(tensor).all() and tensor.abs().max() < 9.0 for tensor in problem.leaves().values() if tensor.numel()
    )
    return (
        finite
        and {"query", "value"} <= set(problem.leaves())
        and drawn.kind == "statistics"
        and problem.query.dtype == torch.float32
    )


def test_a_failure_is_one_line_that_brings_it_back(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def threads_matter(problem: fuzz.Problem, drawn: fuzz.Sample, impl: str, threads: int = 1) -> fuzz.Results:
        found = results(problem, drawn, impl)
        return found if impl == "reference" else {name: tensor + threads for name, tensor in found.items()}

    results = fuzz.results
    monkeypatch.setattr(fuzz, "results", threads_matter)
    monkeypatch.setattr(fuzz, "sample", lambda seed, number: replace(sample(seed, number), threads=2))
    assert fuzz.main(["--seed", "2", "--first", "11", "--count", "2"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("--seed 2 --only 11: ")
    assert "differs on 2 threads" in lines[0]
    assert lines[-1] == f"2 configurations, 2 failures, seed 2, instruction set {cpu._cpu.instruction_set()}"


def test_the_command_ends_with_its_summary() -> None:
    printed = run(sys.executable, "-W", "ignore", "-m", "tests.kernels.fuzz", "--count", "3", "--seed", "4")
    assert printed.splitlines()[-1].startswith("3 configurations, 0 failures, seed 4, instruction set ")
