"""The callbacks on two processes."""

import pytest

from tests.monitor.callbacks import parallel_cases
from tests.processes import names_of, run_cases


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return run_cases(parallel_cases, 2, 200.0)


@pytest.mark.slow
@pytest.mark.parametrize("case", names_of(parallel_cases))
def test_on_two_processes(found: dict[str, str], case: str) -> None:
    assert not found[case], found[case]
