"""Build the kernel under the address and undefined-behaviour sanitizers and run it: the case table, and random problems.

An environment of its own, in build/sanitized, holds the package beside the watched extension and borrows all else: the editable
installation of the one that runs this would come before any path. Each run first sees a planted fault reported.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "sanitized"
IS_WATCHED = """
from pathlib import Path
from attemper.kernels import cpu
assert cpu.available(), "the extension does not load"
assert b"__asan_init" in Path(cpu._cpu.__file__).read_bytes(), f"{cpu._cpu.__file__} is not watched"
isa = cpu._cpu.instruction_set()
"""
MISPLACED = """
import torch
from attemper import attention
from attemper.kernels import cpu
cpu._view = lambda tensor: (0,) * 5 if tensor is None else (tensor.data_ptr() + {bytes}, *tensor.stride())
tensors = (torch.ones(1, 1, {rows}, 5)[:, :, :67] for _ in range(3))
attention(*tensors, softcap=2.0, impl="cpu")  # a plain call is packed elsewhere
"""
CASE_TABLE = """
import torch
from attemper.kernels import row_reduction
from attemper.stats import RowsByHead, RowStats
from tests.attention_cases import CASES, build
from tests.kernels.test_cpu import LARGE, everything
dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
for threads in (1, 2):
    torch.set_num_threads(threads)
    for case in (*CASES, *LARGE):
        for dtype in dtypes:
            record = RowStats(*everything(build(case, dtype))[1:4])
            assert row_reduction.reduced(RowsByHead.of(record)) is not None
print(f"{isa}: {len(CASES + LARGE)} cases in {len(dtypes)} dtypes, on 1 and 2 threads: done")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instruction-sets", default="portable,avx2", help="which builds of the kernel")
    parser.add_argument("--fuzz", type=int, default=400, help="how many random problems each")
    parser.add_argument(
        "--pairs", action="store_true", help="multiply bfloat16 in pairs, as only some processors do by themselves"
    )
    options = parser.parse_args()
    isas = options.instruction_sets.split(",")
    python = build(isas, pairs=options.pairs)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # each step is a process of its own, which waits for no other
        steps = [pool.submit(step) for isa in isas for step in steps_of(environment(isa), python, options.fuzz)]
        for step in steps:
            step.result()
    print(f"no fault seen by the address and undefined-behaviour sanitizers: {', '.join(isas)}")


def steps_of(watched: dict[str, str], python: Path, fuzz: int) -> list[Callable[[], None]]:
    return [
        partial(run, watched, python, "-c", IS_WATCHED + CASE_TABLE),
        partial(run, watched, python, "-m", "tests.kernels.fuzz", "--count", str(fuzz), "--seed", "1"),
        partial(expect, watched, "heap-buffer-overflow", python, "-c", MISPLACED.format(bytes=4, rows=67)),
        partial(expect, watched, "misaligned address", python, "-c", MISPLACED.format(bytes=2, rows=68)),
    ]


def build(isas: list[str], *, pairs: bool) -> Path:
    """The Python of an environment in which attemper is the watched one."""
    settings = {
        "build-dir": str(FOLDER / "cmake"),
        "cmake.build-type": "RelWithDebInfo",
        "install.strip": "false",
        "cmake.define.ATTEMPER_SANITIZE": "address,undefined",
        "cmake.define.ATTEMPER_INSTRUCTION_SETS": ";".join(isas),
        "cmake.define.ATTEMPER_EMULATE_BF16_PAIRS": "ON" if pairs else "OFF",
    }
    package, own = FOLDER / "package", FOLDER / "venv"
    shutil.rmtree(package, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", str(package), str(ROOT)]
    required = os.environ | {"ATTEMPER_REQUIRE_KERNEL": "1"}
    run(required, *pip, *(f"--config-settings={name}={setting}" for name, setting in settings.items()))
    venv.create(own, symlinks=True)
    # Folders on the path, whose own .pth files, an editable installation's among them, are not read.
    paths = [str(package), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    (own / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix) / "paths.pth").write_text("\n".join(dict.fromkeys(paths)))
    return own / "bin" / "python"


def environment(isa: str) -> dict[str, str]:
    # Python is linked to neither. The sanitizer must come first, and look for what throws exceptions when it is loaded.
    libraries = (library("libasan.so"), library("libstdc++.so.6"))
    return os.environ | {
        "ATTEMPER_CPU_ISA": isa,
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",  # an interpreter leaves much behind
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def library(name: str) -> str:
    """Where the compiler has it."""
    asked = [os.environ.get("CXX", "c++"), f"-print-file-name={name}"]
    return str(Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()).resolve())


def run(environment: dict[str, str], *command: str | Path) -> None:
    subprocess.run(command, env=environment, cwd=ROOT, check=True)


def expect(environment: dict[str, str], words: str, *command: str | Path) -> None:
    done = subprocess.run(command, env=environment, cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode == 0 or words not in done.stderr:
        raise SystemExit(f"a planted fault went unseen: no {words!r}, exit code {done.returncode}\n{done.stderr[-4000:]}")


if __name__ == "__main__":
    main()
