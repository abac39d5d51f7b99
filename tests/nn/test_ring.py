"""Ring attention: the parts of several processes make up attention over the whole sequence."""

import pytest

from tests.nn import ring_cases as cases
from tests.processes import names_of, run_cases


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return run_cases(cases, world=4, seconds=180)


@pytest.mark.parametrize("name", names_of(cases))
def test_on_four_processes(outcomes: dict[str, str], name: str) -> None:
    assert not outcomes[name], outcomes[name]
