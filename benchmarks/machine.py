"""The machine a benchmark runs on: its processor as the system names it, and what decides which bars hold there."""

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from attemper.kernels import cpu


@dataclass(frozen=True)
class Machine:
    """A processor and the instruction set that attemper's kernel chose on it.

    vendor, family, flags: as /proc/cpuinfo gives them, "", 0 and empty elsewhere.
    """

    model: str
    vendor: str
    family: int
    flags: frozenset[str]
    cores: int
    instruction_set: str

    @property
    def has_bf16_dot(self) -> bool:
        """Whether the kernel's instruction set has a bfloat16 dot product here."""
        return self.instruction_set.startswith("avx512") and "avx512_bf16" in self.flags

    @property
    def is_amd_with_full_avx512(self) -> bool:
        """Whether 512-bit operations take one pass and MKL does not use them: AMD from Zen 5 (family 26) on.

        Zen 4 has the instructions too and runs them in two passes.
        """
        return self.has_bf16_dot and self.vendor == "AuthenticAMD" and self.family >= 26

    @property
    def mkl_uses_avx512(self) -> bool:
        """Whether PyTorch's own kernels run on AVX-512 like ours: MKL chooses it on Intel processors alone."""
        return self.vendor == "GenuineIntel" and "avx512f" in self.flags and self.instruction_set.startswith("avx512")

    def __str__(self) -> str:
        return f"{self.model}, {self.cores} cores, kernel {self.instruction_set}, torch {torch.__version__}"


def here() -> Machine:
    """This machine.

    Raises:
        SystemExit: the compiled kernel is not built here.
    """
    if not cpu.available():
        raise SystemExit(f"there is nothing to measure without the compiled kernel: {cpu.describe()}")
    from attemper.kernels import _cpu

    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text("utf-8") if cpuinfo.exists() else ""

    def field(name: str) -> str:
        found = re.search(rf"^{name}\s*:\s*(.*)$", text, re.MULTILINE)
        return found[1].strip() if found else ""

    return Machine(
        model=field("model name") or platform.processor() or platform.machine(),
        vendor=field("vendor_id"),
        family=int(field("cpu family") or 0),
        flags=frozenset((field("flags") or field("Features")).split()),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        instruction_set=_cpu.instruction_set(),
    )
