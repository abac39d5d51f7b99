"""The callbacks on two processes."""

import pytest

from tests.monitor.callbacks import parallel_cases
from tests.processes import on_processes

test_on_two_processes = pytest.mark.slow(on_processes(parallel_cases, 2))
