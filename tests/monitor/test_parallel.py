"""`attemper.watch` under DDP, FSDP2, tensor parallelism, both at once, and in a pipeline: the record of one process."""

import pytest

from tests.monitor import parallel_cases as cases
from tests.processes import on_processes

test_on_four_processes = pytest.mark.slow(on_processes(cases, 4))
