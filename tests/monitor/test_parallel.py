"""`attemper.watch` under DDP, FSDP2, tensor parallelism, both at once, and in a pipeline: the record of one process."""

import pytest

from tests.monitor import parallel_cases as cases
from tests.processes import names_of, run_cases


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return run_cases(cases, world=4, seconds=300)


@pytest.mark.slow
@pytest.mark.parametrize("name", names_of(cases))
def test_on_four_processes(outcomes: dict[str, str], name: str) -> None:
    assert not outcomes[name], outcomes[name]
