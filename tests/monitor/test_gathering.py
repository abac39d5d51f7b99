"""Statistics over processes: gathered, they are those of one process."""

import pytest
import torch
from torch import nn

from attemper.monitor.gathering import gather, gather_maxima
from attemper.monitor.layout import Plan
from tests.monitor import gathering_cases as cases
from tests.processes import on_processes

test_on_four_processes = pytest.mark.slow(on_processes(cases, 4))


def test_alone_it_is_a_copy_to_the_host() -> None:
    layers = [cases.whole(name) for name in cases.NAMES]
    plan = Plan(cases.Decoder())
    for _ in range(2):
        cases.same_all(gather(layers[::-1], plan), layers)
    assert gather([], plan) == ()
    assert torch.equal(gather_maxima({(cases.NAMES[1], 0): layers[1].scaled_max}, plan)[cases.NAMES[1]], layers[1].scaled_max)


def test_alone_a_layer_may_get_other_heads() -> None:
    plan = Plan(nn.Identity())
    for heads in (slice(0, 2), slice(1, 6), slice(3, 3)):
        layer = cases.part("0", slice(None), heads)
        cases.same_all(gather([layer], plan), [layer] if layer.stats.heads else [])
