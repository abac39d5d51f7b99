import re

import pytest
import torch

from attemper.errors import ArgumentError
from attemper.lab.models import build
from attemper.lab.presets import NAMES, preset
from attemper.lab.room import least_bytes, memory_told
from attemper.lab.tasks import load_task
from tests.lab_runs import tiny


@pytest.mark.parametrize(
    ("shape", "asked"),
    [((2**58,), "(288230376151711744 bytes at once)"), ((2**40, 2**40), "(more than can be counted at once)")],
)
def test_what_the_system_says_of_memory_is_said_with_what_to_do(shape: tuple[int, ...], asked: str) -> None:
    said = re.escape(f"run: got one for which the system has no memory {asked}; expected runs that fit: a smaller batch")
    with pytest.raises(ArgumentError, match=said), memory_told():
        torch.empty(shape, dtype=torch.uint8)


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"), memory_told():
        torch.ones(2, 3) @ torch.ones(2, 3)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_least_is_less_than_what_weights_and_logits_take(name: str) -> None:
    config = tiny(optimiser={"name": name}, batch=97)
    task = load_task(config.task)
    weights = sum(parameter.numel() for parameter in build(config, task).parameters())
    most = 4 * (4 * weights + config.batch * config.task.length * 2 * task.classes) + 2**16
    assert most / 8 < least_bytes(config) < most


def test_presets_need_little() -> None:
    assert all(least_bytes(run) < 2**30 for name in NAMES for run in preset(name).runs("full"))
