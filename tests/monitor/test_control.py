"""QKClip and Penalties on several processes."""

from tests.monitor import control_cases
from tests.processes import on_processes

test_on_two_processes = on_processes(control_cases, 2)
