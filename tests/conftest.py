"""What every test stands on: one seed, one thread, no network, NaN in memory that nobody wrote, and the shared cases."""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Set before torch, transformers and tokenizers are imported, and inherited by the commands that tests start: one thread each,
# since two workers share two cores; no waiting for a network; no warning about a fork.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
from hypothesis import register_random, settings
from torch.utils._device import _device_constructors

ROOT = Path(__file__).resolve().parent.parent
SEED = 20261129


class _TorchRandom:
    """Torch's generator, in the shape that hypothesis seeds and restores for each of its examples."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


_TORCH_RANDOM = _TorchRandom()  # hypothesis keeps a weak reference
register_random(_TORCH_RANDOM)
settings.register_profile("attemper", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("attemper")


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Fill with NaN what attemper itself allocates.

    A value read before it was written then shows in every result. Only calls from attemper's own modules are touched:
    torch.nn and transformers allocate parameters this way and some of theirs are never initialised.
    """

    @functools.wraps(allocate)
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        if torch.compiler.is_compiling():  # a traced graph would break on the look at the caller
            return tensor
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.partition(".")[0] == "attemper" and (tensor.is_floating_point() or tensor.is_complex()):
            tensor.detach().fill_(float("nan"))
        return tensor

    return wrapper


_device_constructors()  # cached by torch: with the wrappers in it, torch.device("meta") would allocate
torch.empty = _poisoned(torch.empty)
torch.empty_like = _poisoned(torch.empty_like)
torch.empty_strided = _poisoned(torch.empty_strided)
torch.Tensor.new_empty = _poisoned(torch.Tensor.new_empty)


@pytest.fixture(autouse=True)
def _same_start() -> None:
    """One thread, so that sums are added in the same order on every machine; one seed, so that a failure comes back."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)


@pytest.fixture(scope="session")
def cases() -> Path:
    """The folder of shared inputs on which other systems failed, beside the repository."""
    folder = ROOT.parent / "shared" / "cases"
    if not folder.is_dir():
        pytest.skip("the shared cases are not here: ../shared/cases beside the repository")
    return folder
