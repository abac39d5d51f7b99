"""The most that this machine's vector units can do, measured by peak.cpp, which the system's compiler builds for the occasion."""

import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from benchmarks.machine import Machine

SOURCE = Path(__file__).with_name("peak.cpp")
SECONDS = 0.1  # of one try; peak.cpp takes the best of five

_X86_WIDTHS: dict[int, tuple[str, ...]] = {
    512: ("-mavx512f", "-mfma", "-mprefer-vector-width=512"),
    256: ("-mavx2", "-mfma"),
    128: (),  # the portable build has no multiply-add: a multiplication and an addition count as one
}


class Peak(NamedTuple):
    """Operations a second of all threads together, a multiply-add being two.

    float32: by vector width in bits, the widest first, which is the one that the kernel uses; bfloat16: of the dot product,
    None where there is none.
    """

    float32: dict[int, float]
    bfloat16: float | None

    def of(self, dtype: str) -> float:
        """The ceiling for inputs of a dtype: without a dot product of its own, a 16-bit type is computed in float32."""
        if dtype == "bfloat16" and self.bfloat16 is not None:
            return self.bfloat16
        return max(self.float32.values())


class Programs:
    """The measuring programs, built on entry into a temporary folder; `failure` says why there are none, "" if there are."""

    def __init__(self, machine: Machine) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._machine = machine
        self._programs: dict[int, Path] = {}
        self.failure = ""

    def __enter__(self) -> Self:
        compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))), None)
        if compiler is None:
            self.failure = "no C++ compiler was found"
            return self
        for bits, options in _widths(self._machine).items():
            program = Path(self._folder.name) / f"peak{bits}"
            command = [compiler, "-std=c++17", "-O3", "-w", "-pthread", *options, f"-DATTEMPER_VECTOR_BYTES={bits // 8}"]
            done = subprocess.run([*command, str(SOURCE), "-o", str(program)], capture_output=True, text=True, check=False)
            if done.returncode:
                self.failure = f"{compiler} could not build {SOURCE.name}: {done.stderr.strip().splitlines()[-1:]}"
                self._programs.clear()
                return self
            self._programs[bits] = program
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._folder.cleanup()

    def measure(self, threads: int, seconds: float = SECONDS) -> Peak:
        """The ceilings with so many threads, where there is no failure."""
        found = {bits: _run(program, threads, seconds) for bits, program in self._programs.items()}
        dots = [rates["bfloat16"] for rates in found.values() if "bfloat16" in rates]
        return Peak({bits: rates["float32"] for bits, rates in found.items()}, max(dots, default=None))


def _widths(machine: Machine) -> dict[int, tuple[str, ...]]:
    """The compiler's options for each vector width up to the one that the kernel uses."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return {128: ()}
    widest = 512 if machine.instruction_set.startswith("avx512") else 256 if machine.instruction_set == "avx2" else 128
    widths = {bits: options for bits, options in _X86_WIDTHS.items() if bits <= widest}
    if machine.has_bf16_dot:
        widths[512] += ("-mavx512bf16",)
    return widths


def _run(program: Path, threads: int, seconds: float) -> dict[str, float]:
    done = subprocess.run([str(program), str(threads), str(seconds)], capture_output=True, text=True, check=True)
    return {name: float(rate) for name, rate in map(str.split, done.stdout.splitlines())}
