"""Which tile a kernel gets: timed once, kept in memory and in a file, and by the table wherever timing is not wanted."""

import contextlib
import errno
import json
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attemper.errors import ArgumentError
from attemper.kernels import triton_choices, triton_tuning
from attemper.kernels.spec import Inputs, Rules
from attemper.kernels.triton_choices import ChoiceFile, cache_folder
from attemper.kernels.triton_problem import Launch, arguments
from attemper.kernels.triton_tuning import VARIABLE, Cut, Tuner, key_of

FIRST, SECOND, THIRD = Cut(64, 32, 4, 2), Cut(128, 32, 8, 2), Cut(64, 32, 4, 3)
CUTS = [FIRST, SECOND, THIRD]
GIVEN = torch.zeros(1)


class Clock:
    """Tells one time after another, and counts how often it was asked."""

    def __init__(self, *times: float) -> None:
        self.times, self.asked = times, 0

    def __call__(self, call: Callable[[], None]) -> float:
        call()
        self.asked += 1
        return self.times[(self.asked - 1) % len(self.times)]


def nothing(cut: Cut) -> Sequence[Launch]:
    return ()


def tuner(clock: Clock, folder: Path, *, capturing: bool = False, wanted: bool = True) -> Tuner:
    return Tuner(clock, lambda device: wanted, lambda given: capturing, lambda: folder)


def choose(by: Tuner, key: str = "attend float16", cuts: Sequence[Cut] = CUTS) -> Cut:
    return by.choose(cuts, lambda: key, nothing, GIVEN)


def the_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_the_fastest_is_chosen_and_each_kind_of_call_is_timed_once(tmp_path: Path) -> None:
    clock = Clock(2.0, 1.0, 3.0)
    ours = tuner(clock, tmp_path)
    assert [choose(ours) for _ in range(3)] == [SECOND] * 3
    assert clock.asked == 3
    assert choose(ours, "attend bfloat16") == SECOND
    assert clock.asked == 6


def test_a_tie_goes_to_the_table(tmp_path: Path) -> None:
    assert choose(tuner(Clock(1.0), tmp_path)) == FIRST


def test_what_cannot_run_is_not_chosen(tmp_path: Path) -> None:
    assert choose(tuner(Clock(float("inf"), float("inf"), 9.0), tmp_path)) == THIRD


def test_where_nothing_could_be_timed_it_is_tried_again_by_the_next_process(tmp_path: Path) -> None:
    assert choose(tuner(Clock(float("inf")), tmp_path)) == FIRST
    assert choose(tuner(Clock(3.0, 2.0, 1.0), tmp_path)) == THIRD


@pytest.mark.parametrize("where", ["the kernel", "what it works in"])
def test_a_tile_that_met_full_memory_is_not_slow_for_ever(where: str, tmp_path: Path) -> None:
    def fail(**_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def launches(cut: Cut) -> Sequence[Launch]:
        if cut != SECOND:
            return ()
        if where == "what it works in":
            fail()
        return [Launch({(1,): fail}, (1,), {"given": GIVEN}, {})]

    ours = tuner(Clock(3.0), tmp_path)
    assert ours.choose(CUTS, lambda: "key", launches, GIVEN) == FIRST
    assert not list(tmp_path.iterdir())
    assert choose(ours, "key") == FIRST  # for this process it holds
    assert choose(tuner(Clock(3.0, 2.0, 1.0), tmp_path), "key") == THIRD


def test_a_single_tile_is_not_timed(tmp_path: Path) -> None:
    clock = Clock(1.0)
    assert choose(tuner(clock, tmp_path), cuts=[THIRD]) == THIRD
    assert clock.asked == 0


def test_another_process_finds_the_choice(tmp_path: Path) -> None:
    choose(tuner(Clock(2.0, 1.0, 3.0), tmp_path))
    clock = Clock(1.0, 2.0, 3.0)
    assert choose(tuner(clock, tmp_path)) == SECOND
    assert clock.asked == 0


def test_two_processes_keep_what_each_has_found(tmp_path: Path) -> None:
    one, other = tuner(Clock(2.0, 1.0, 3.0), tmp_path), tuner(Clock(3.0, 2.0, 1.0), tmp_path)
    choose(one, "a"), choose(other, "b"), choose(one, "c")
    tiles = json.loads(the_file(tmp_path).read_text("utf-8"))["tiles"]
    assert tiles == {"a": list(SECOND), "b": list(THIRD), "c": list(SECOND)}


def test_a_choice_that_is_no_longer_offered_is_made_again(tmp_path: Path) -> None:
    choose(tuner(Clock(2.0, 1.0, 3.0), tmp_path))
    clock = Clock(2.0, 1.0)
    assert choose(tuner(clock, tmp_path), cuts=[FIRST, THIRD]) == THIRD
    assert clock.asked == 2


CORRUPT = {
    "empty": "",
    "cut short": '{"format": 1, "tiles": {"attend',
    "a list": "[]",
    "another format": '{"format": 2, "tiles": {}}',
    "no numbers": '{"format": 1, "tiles": {"attend float16": ["64", 32, 4, 2]}}',
    "no object": '{"format": 1, "tiles": [1]}',
    "too deep": "[" * 100_000,
}


@pytest.mark.parametrize("content", CORRUPT.values(), ids=CORRUPT)
def test_a_file_that_cannot_be_understood_is_ignored_with_a_warning(content: str, tmp_path: Path) -> None:
    choose(tuner(Clock(1.0), tmp_path))
    path = the_file(tmp_path)
    if content.startswith("{"):
        content = content.replace(
            "{", json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "tiles"})[:-1] + ", ", 1
        )
    path.write_text(content, "utf-8")
    with pytest.warns(UserWarning, match=rf"{path.name}, the choices of tiles, is ignored: "):
        assert choose(tuner(Clock(3.0, 2.0, 1.0), tmp_path)) == THIRD
    clock = Clock(1.0)
    assert choose(tuner(clock, tmp_path)) == THIRD  # it was written anew
    assert clock.asked == 0


def test_bytes_that_are_no_text_are_ignored_too(tmp_path: Path) -> None:
    choose(tuner(Clock(1.0), tmp_path))
    the_file(tmp_path).write_bytes(b"\xff\xfe\x00")
    with pytest.warns(UserWarning, match="is ignored: 'utf-8' codec can't decode"):
        assert choose(tuner(Clock(3.0, 2.0, 1.0), tmp_path)) == THIRD


def test_a_file_too_large_to_be_one_is_not_loaded(tmp_path: Path) -> None:
    choose(tuner(Clock(1.0), tmp_path))
    os.truncate(the_file(tmp_path), 2**24 + 1)
    with pytest.warns(UserWarning, match="is ignored: more than 16777216 bytes; it will be written anew"):
        assert choose(tuner(Clock(3.0, 2.0, 1.0), tmp_path)) == THIRD
    assert the_file(tmp_path).stat().st_size < 1000


def test_a_folder_in_the_place_of_the_file_costs_warnings(tmp_path: Path) -> None:
    choose(tuner(Clock(1.0), tmp_path))
    path = the_file(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.warns(UserWarning, match="Is a directory") as said:
        assert choose(tuner(Clock(3.0, 2.0, 1.0), tmp_path)) == THIRD
    assert "a choice of tiles cannot be kept:" in str(said[-1].message)
    assert the_file(tmp_path) == path  # and nothing is left beside it


def test_a_full_disk_costs_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(tuner(Clock(1.0), tmp_path), "before")

    def full(descriptor: int, *_: object, **__: object) -> Any:
        os.close(descriptor)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(triton_choices.os, "fdopen", full)
    with pytest.warns(UserWarning, match=r"a choice of tiles cannot be kept: .*No space left on device: .*; it holds"):
        assert choose(tuner(Clock(2.0, 1.0, 3.0), tmp_path)) == SECOND
    assert json.loads(the_file(tmp_path).read_text("utf-8"))["tiles"] == {"before": list(FIRST)}


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ours = tuner(Clock(2.0, 1.0, 3.0), tmp_path / "file" / "folder")
    with pytest.warns(UserWarning, match="a choice of tiles cannot be kept:"):
        assert choose(ours) == SECOND
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose(ours) == SECOND


def test_what_made_the_choices_is_in_the_name_and_in_the_file(tmp_path: Path) -> None:
    for device in ("one GPU", "another"):
        ChoiceFile(lambda: tmp_path, {"triton": "3.8.0", "device": device}).add("key", FIRST)
    assert len(list(tmp_path.iterdir())) == 2
    assert ChoiceFile(lambda: tmp_path, {"triton": "3.8.0", "device": "another"}).read() == {"key": tuple(FIRST)}
    assert ChoiceFile(lambda: tmp_path, {"triton": "3.9.0", "device": "another"}).read() == {}


def test_triton_may_be_installed_by_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")

    def version(package: str) -> str:
        if package == "triton":
            raise PackageNotFoundError(package)
        return "0.1.0"

    monkeypatch.setattr(triton_tuning, "version", version)
    made = {"attemper": "0.1.0", "triton": triton.__version__, "device": "a GPU"}
    assert triton_tuning.made_by("a GPU") == made


def test_nothing_is_timed_while_a_graph_is_captured(tmp_path: Path) -> None:
    clock = Clock(2.0, 1.0, 3.0)
    captured = [True]
    ours = Tuner(clock, lambda device: True, lambda given: captured[0], lambda: tmp_path)
    assert choose(ours) == FIRST
    assert clock.asked == 0
    captured[0] = False
    assert choose(ours) == SECOND
    captured[0] = True
    assert choose(ours) == SECOND  # made before


@pytest.mark.parametrize("captured", [None, "current", "of the tensor"])
def test_a_graph_may_be_captured_on_the_current_gpu_or_on_that_of_the_tensors(
    captured: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = ["current"]

    @contextlib.contextmanager
    def device_of(given: Tensor) -> Iterator[None]:
        gpu[0] = "of the tensor"
        yield
        gpu[0] = "current"

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu[0] == captured)
    assert triton_tuning.capturing(GIVEN) == (captured is not None)


def test_many_threads_time_once(tmp_path: Path) -> None:
    clock = Clock(2.0, 1.0, 3.0)
    ours, found = tuner(clock, tmp_path), []
    threads = [threading.Thread(target=lambda: found.append(choose(ours))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [SECOND] * 8
    assert clock.asked == 3


def on_gpu(number: int) -> Any:
    """What the tuner asks of a tensor on a GPU that is not there."""
    return SimpleNamespace(device=torch.device("cuda", number), is_cuda=False)


def of_name(name: str, multiprocessors: int = 132) -> Any:
    """What torch tells of a GPU."""
    return SimpleNamespace(name=name, major=9, minor=0, multi_processor_count=multiprocessors)


def test_threads_of_two_gpus_do_not_wait_for_each_other_and_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: of_name("a GPU"))
    both = threading.Barrier(2, timeout=20)  # as a collective: neither GPU is done before the other has begun
    times = iter([2.0, 1.0, 3.0, 3.0, 2.0, 1.0])

    def timer(call: Callable[[], None]) -> float:
        both.wait()
        return next(times)

    ours, found = Tuner(timer, lambda device: True, lambda given: False, lambda: tmp_path), []

    def ask(number: int) -> None:
        found.append(ours.choose(CUTS, lambda: "key", nothing, on_gpu(number)))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ask(2)  # finds the choice
    assert found == found[:1] * 3
    assert json.loads(the_file(tmp_path).read_text("utf-8"))["tiles"] == {"key": list(found[0])}


def test_gpus_that_share_a_name_alone_share_no_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: of_name("AMD Radeon Graphics", (8, 96)[device.index]))
    ours = tuner(Clock(2.0, 1.0, 3.0, 3.0, 2.0, 1.0), tmp_path)
    assert [ours.choose(CUTS, lambda: "key", nothing, on_gpu(number)) for number in (0, 1, 0)] == [SECOND, THIRD, SECOND]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_choice_holds_though_it_cannot_be_kept_and_warnings_are_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    clock = Clock(2.0, 1.0, 3.0)
    ours = tuner(clock, tmp_path / "file" / "folder")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="a choice of tiles cannot be kept:"):
            choose(ours)
        assert choose(ours) == SECOND
    assert clock.asked == 3


def test_an_error_while_timing_is_the_callers_and_leaves_no_choice(tmp_path: Path) -> None:
    clock = Clock(2.0, 1.0, 3.0)

    def failing(call: Callable[[], None]) -> float:
        if clock(call) == 1.0:
            raise RuntimeError("an illegal memory access")
        return 2.0

    ours = Tuner(failing, lambda device: True, lambda given: False, lambda: tmp_path)
    for _ in range(2):
        clock.asked = 0
        with pytest.raises(RuntimeError, match="an illegal memory access") as raised:
            choose(ours)
        assert clock.asked == 2
        said = f"attemper was timing {SECOND}; with ATTEMPER_TRITON_TUNE=0 in the environment it times nothing"
        assert raised.value.__notes__ == [said]
    assert not list(tmp_path.iterdir())


def test_where_timing_is_not_wanted_the_table_serves(tmp_path: Path) -> None:
    clock = Clock(2.0, 1.0, 3.0)
    assert choose(tuner(clock, tmp_path, wanted=False)) == FIRST
    assert clock.asked == 0
    assert not list(tmp_path.iterdir())


def test_timing_is_wanted_on_a_gpu_alone_and_never_for_deterministic_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VARIABLE, "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    gpu = torch.device("cuda", 0)
    assert triton_tuning.wanted(gpu)
    assert not triton_tuning.wanted(torch.device("cpu"))
    assert not triton_tuning.wanted(torch.device("meta"))
    monkeypatch.setenv(VARIABLE, "0")
    assert not triton_tuning.wanted(gpu)
    monkeypatch.setenv(VARIABLE, "1")
    assert triton_tuning.wanted(gpu)
    for warn_only in (False, True):
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        try:
            assert not triton_tuning.wanted(gpu)
        finally:
            torch.use_deterministic_algorithms(False)
    assert triton_tuning.wanted(gpu)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not triton_tuning.wanted(gpu)  # the times of the interpreter are not the GPU's


def test_a_tile_for_which_a_gpu_has_too_little_takes_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    testing, errors = (pytest.importorskip(f"triton.{name}") for name in ("testing", "runtime.errors"))

    def bench(call: Callable[[], None], **_: object) -> float:
        call()
        return 3.0

    def too_much() -> None:
        raise errors.OutOfResources(300_000, 232_448, "shared memory")

    def broken() -> None:
        raise RuntimeError("an illegal memory access")

    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(testing, "do_bench", bench)
    assert triton_tuning.milliseconds(lambda: None) == 3.0
    assert triton_tuning.milliseconds(too_much) == float("inf")
    with pytest.raises(RuntimeError, match="an illegal memory access"):
        triton_tuning.milliseconds(broken)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        triton_tuning.milliseconds(full)


class Driver:
    """Of a GPU that is not there, what Triton's own timing asks it for; every run takes as long."""

    class Event:
        def __init__(self, driver: "Driver") -> None:
            self.driver, self.at = driver, 0.0

        def record(self) -> None:
            self.at = self.driver.now

        def elapsed_time(self, end: "Driver.Event") -> float:
            return end.at - self.at

    def __init__(self) -> None:
        self.now, self.runs = 0.0, 0

    def run(self) -> None:
        self.now += 1000.0
        self.runs += 1

    def get_device_interface(self) -> Any:
        return SimpleNamespace(Event=lambda enable_timing: self.Event(self), synchronize=lambda: None)

    def get_empty_cache_for_benchmark(self) -> None:
        return None

    def clear_cache(self, _: None) -> None:
        self.now += 0.1


def test_the_time_is_that_of_one_run_by_tritons_own_measure_and_takes_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    testing, driver = pytest.importorskip("triton.testing"), Driver()
    monkeypatch.setattr(testing.runtime, "driver", SimpleNamespace(active=driver))
    assert triton_tuning.milliseconds(driver.run) == 1000.0
    assert driver.runs == 8  # as docs/kernels-triton.md has it


def test_another_value_of_the_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(ArgumentError, match="ATTEMPER_TRITON_TUNE: got 'yes'; expected '1' to time tiles once"):
        triton_tuning.wanted(torch.device("cuda"))


def key(queries: int = 100, keys: int = 100, dtype: torch.dtype = torch.float16, kv_heads: int = 4, **rules: object) -> str:
    query, of_keys = torch.empty(1, 4, queries, 64, dtype=dtype), torch.empty(1, kv_heads, keys, 64, dtype=dtype)
    inputs = Inputs(query, of_keys, of_keys, None, torch.ones(1, 1, 1), None)
    return key_of("attend", arguments(inputs, Rules(**rules)), dtype, 4 * queries)


def test_a_kind_of_call_is_what_it_is_compiled_for_and_how_long_it_is() -> None:
    assert key() == key(queries=65, keys=128) == key(seed=5)
    others = [key(queries=129), key(keys=64), key(dtype=torch.bfloat16), key(kv_heads=2), key(is_causal=True)]
    others += [key(softcap=2.0), key(dropout_p=0.1), key(window=(3, None))]
    assert len({key(), *others}) == 1 + len(others)


def lies(*, step: int = 64, begin: int = 0, column: int = 1) -> str:
    """The kind of a call whose keys lie so many numbers apart, and begin at a number of 16 bits that is not the first."""
    query, memory = torch.zeros(1, 2, 32, 64, dtype=torch.float16), torch.zeros(10_000, dtype=torch.float16)
    of_keys = memory.as_strided((1, 2, 32, 64), (32 * step, 32 * step, step, column), begin)
    inputs = Inputs(query, of_keys, query, None, torch.ones(1, 1, 1), None)
    return key_of("attend", arguments(inputs, Rules()), torch.float16, 64)


def test_what_is_not_loaded_in_stages_is_a_kind_of_its_own() -> None:
    assert lies() == lies(step=80) == lies(begin=8)
    assert lies(step=72) == lies(begin=1) == lies(step=1, column=32) != lies()


def test_where_the_platform_keeps_such_files(tmp_path: Path) -> None:
    home = Path.home()
    assert cache_folder({"XDG_CACHE_HOME": str(tmp_path)}, "linux") == tmp_path / "attemper"
    assert cache_folder({"XDG_CACHE_HOME": "relative"}, "linux") == home / ".cache" / "attemper"
    assert cache_folder({}, "darwin") == home / "Library" / "Caches" / "attemper"
    assert cache_folder({"LOCALAPPDATA": str(tmp_path)}, "win32") == tmp_path / "attemper"


@pytest.mark.skipif(sys.platform == "win32", reason="finds a home by other means")
def test_where_there_is_neither_a_home_nor_a_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as where the user has no entry

    def nowhere() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    assert cache_folder({}, "linux") == Path(tempfile.gettempdir()) / ".cache" / "attemper"
    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    assert cache_folder({}, "linux") == Path("/.cache/attemper")
