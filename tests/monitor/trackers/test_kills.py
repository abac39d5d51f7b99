"""A kill at any moment loses no step that was logged, and no reader sees a step twice."""

import sys
from pathlib import Path

import pytest

from tests.running import run


@pytest.mark.slow
@pytest.mark.parametrize(("tracker", "places"), [("JSONLines", 1), ("Parquet", 30)])
def test_a_run_outlives_its_process(tracker: str, places: int, tmp_path: Path) -> None:
    everywhere, at_random = map(int, run(sys.executable, "-m", "tests.killing", tracker, str(tmp_path)).split())
    assert everywhere >= places
    assert at_random > 0
