"""Weights that lie in shards on several processes."""

from tests.processes import on_processes
from tests.weights import sharded_cases

test_on_two_processes = on_processes(sharded_cases, 2)
