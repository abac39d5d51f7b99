"""A sweep that is killed, whenever that is, comes to the same files and the same table once it is gone on with."""

import sys
from pathlib import Path

import pytest

from tests.running import run


@pytest.mark.slow
def test_a_sweep_outlives_its_process_wherever_it_is_killed(tmp_path: Path) -> None:
    assert int(run(sys.executable, "-m", "tests.lab_killing", str(tmp_path))) >= 25
