"""Which tile a kernel gets: the first of a few, or on a GPU the one found fastest, timed once for each kind of call and kept.

What it must hold:
- under `torch.use_deterministic_algorithms`, with ATTEMPER_TRITON_TUNE=0, off the GPU and under the interpreter it is the first,
  by the call alone;
- nothing is timed while a CUDA graph is captured: then it is the first, unless the choice was made before;
- a choice holds for the rest of the process, so that the same call twice gives the same bits;
- what is timed writes nothing but what the call is about to write.
"""

import os
import threading
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attemper.errors import ArgumentError
from attemper.kernels.triton_choices import ChoiceFile, cache_folder
from attemper.kernels.triton_problem import Launch, interpreted

VARIABLE = "ATTEMPER_TRITON_TUNE"

_WARM_UP, _REPEAT = 5.0, 25.0  # milliseconds for each tile


class Cut(NamedTuple):
    """Rows and keys of a tile, warps of a program, and stages of its loads."""

    rows: int
    keys: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        """How a kernel is compiled for it."""
        return {"num_warps": self.warps, "num_stages": self.stages}


Timer = Callable[[Callable[[], None]], float]


def wanted(device: torch.device) -> bool:
    """Whether a choice is to be made by time for tensors on a device.

    Raises:
        ArgumentError: ATTEMPER_TRITON_TUNE is neither "0" nor "1".
    """
    if device.type != "cuda" or interpreted():  # the interpreter takes tensors on a GPU too
        return False
    given = os.environ.get(VARIABLE, "1")
    if given not in ("0", "1"):
        raise ArgumentError(
            VARIABLE, repr(given), "'1' to time tiles once for each kind of call, '0' for a fixed table, or unset"
        )
    return given == "1" and not torch.are_deterministic_algorithms_enabled()


def capturing(given: Tensor) -> bool:
    """Whether the current stream, or that of a tensor's GPU, only records what it is given; then no GPU may be waited for."""
    here = torch.cuda.is_current_stream_capturing()
    with torch.cuda.device_of(given):
        return here or torch.cuda.is_current_stream_capturing()


def milliseconds(call: Callable[[], None]) -> float:
    """How long a call takes on the GPU, by Triton's own measure; infinite where its tile asks for more than the GPU has.

    Raises:
        torch.OutOfMemoryError: there is not enough memory for it now, or for the 256 MB that are written between two runs.
    """
    from triton.compiler.errors import CompileTimeAssertionFailure
    from triton.runtime.errors import OutOfResources, PTXASError
    from triton.testing import do_bench

    try:
        median = do_bench(call, warmup=_WARM_UP, rep=_REPEAT, return_mode="median")
    except (OutOfResources, PTXASError, CompileTimeAssertionFailure):
        return float("inf")
    assert isinstance(median, float)
    return median


class Tuner:
    """Choices by time, in memory and in a file of each device.

    Args:
        timer: how long a call takes, infinite where it cannot run; wanted: whether to time for tensors on a device; capturing:
            whether a CUDA graph is captured while a call on a tensor is made; folder: gives the folder of the files.
    """

    def __init__(
        self,
        timer: Timer = milliseconds,
        wanted: Callable[[torch.device], bool] = wanted,
        capturing: Callable[[Tensor], bool] = capturing,
        folder: Callable[[], Path] = cache_folder,
    ) -> None:
        self._timer, self._wanted, self._capturing, self._folder = timer, wanted, capturing, folder
        self._chosen: dict[tuple[str, str, tuple[Cut, ...]], Cut] = {}
        self._kept: dict[str, dict[str, tuple[int, ...]]] = {}
        # One for each GPU, as autograd has a thread for each: who times waits for all that a GPU was given, a collective may be
        # among it, and that for what a thread of another GPU is about to give.
        self._locks: dict[torch.device, threading.Lock] = {}

    def choose(
        self, candidates: Sequence[Cut], key: Callable[[], str], launches: Callable[[Cut], Sequence[Launch]], given: Tensor
    ) -> Cut:
        """The tile for a call.

        Args:
            candidates: the tiles to choose from, first the one that serves where nothing is timed; key: names the kind of call;
            launches: what a call runs if it gets a tile, given: a tensor on its device.
        """
        device = given.device
        if len(candidates) == 1 or not self._wanted(device):
            return candidates[0]
        place = (_name_of(device), key(), tuple(candidates))
        if (found := self._chosen.get(place)) is not None:
            return found
        with self._locks.setdefault(device, threading.Lock()):
            return self._chosen.get(place) or self._choose(place, launches, given)  # by another thread, meanwhile

    def _choose(self, place: tuple[str, str, tuple[Cut, ...]], launches: Callable[[Cut], Sequence[Launch]], given: Tensor) -> Cut:
        device, key, candidates = place
        file = ChoiceFile(self._folder, made_by(device))
        if device not in self._kept:
            self._kept[device] = file.read()
        kept = self._kept[device].get(key, ())
        found = next((each for each in candidates if tuple(each) == kept), None)
        if found is not None:
            return self._chosen.setdefault(place, found)
        if self._capturing(given):
            return candidates[0]
        try:
            times = [self._time(each, launches, given) for each in candidates]
        except torch.OutOfMemoryError:  # it may have hit any tile, and says nothing about it
            times = [float("inf")]
        fastest = min(times)
        ours = candidates[times.index(fastest)]
        found = self._chosen.setdefault(place, ours)  # on another GPU of that name it may have been made already
        if found is ours and fastest < float("inf"):  # otherwise the next process tries again
            file.add(key, tuple(found))
        return found

    def _time(self, cut: Cut, launches: Callable[[Cut], Sequence[Launch]], given: Tensor) -> float:
        try:
            calls = launches(cut)

            def call() -> None:
                for each in calls:
                    each.run()

            with torch.cuda.device_of(given):
                return self._timer(call)
        except Exception as error:
            error.add_note(f"attemper was timing {cut}; with {VARIABLE}=0 in the environment it times nothing")
            raise


def key_of(kernel: str, arguments: dict[str, Any], dtype: torch.dtype, rows: int) -> str:
    """What a kernel is compiled for, beside its tile, and how much there is to do, each number to the next power of two.

    Args:
        kernel: its name; arguments: what it is given, by name; dtype: of the query; rows: [batch, heads, queries] in all.
    """
    compiled = (f"{name}={int(each)}" for name, each in arguments.items() if name.isupper())
    without = (name for name, each in arguments.items() if each is None and name not in _KEPT_FOR_GRADIENTS)
    lengths = {"rows": rows, "queries": arguments["queries"], "keys": arguments["keys"]}
    sizes = (f"{name}<={1 << max(length - 1, 0).bit_length()}" for name, length in lengths.items())
    grouped = "grouped" if arguments["groups"] > 1 else "single"
    return " ".join(
        (kernel, str(dtype).removeprefix("torch."), *sizes, grouped, *compiled, "without", *without, "apart", *_apart(arguments))
    )


# A call has one tile whether or not gradients are wanted: activation checkpointing may make it both ways, for the same numbers.
_KEPT_FOR_GRADIENTS = ("figures", "unrounded")
# What is loaded in tiles, and what its strides are called.
_LOADED = {"query": "query", "key": "key", "value": "value", "mask": "mask", "d_output": "flow"}


def _apart(arguments: dict[str, Any]) -> list[str]:
    """What does not lie so that Triton loads 16 bytes at once. Only what does is loaded in stages, which take shared memory."""
    found = []
    for name, called in _LOADED.items():
        tensor = arguments.get(name)
        if tensor is None:
            continue
        steps = (arguments[f"{called}_{dimension}"] for dimension in ("batch", "head", "row"))
        if arguments[f"{called}_column"] != 1 or tensor.data_ptr() % 16 or any(step % 16 for step in steps):
            found.append(name)
    return found


def _name_of(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    # The name alone does not tell: parts of some cards share it, and under AMD's drivers many are "AMD Radeon Graphics".
    found = torch.cuda.get_device_properties(device)
    return f"{found.name} {found.major}.{found.minor}, {found.multi_processor_count} multiprocessors"


def made_by(device: str) -> dict[str, str]:
    """What the choices for a device stand on, by name; device: its name."""
    import triton  # asked itself: what it is installed as differs, pytorch-triton-rocm or triton-windows, say

    return {"attemper": version("attemper"), "triton": triton.__version__, "device": device}


TUNER = Tuner()
