"""What the Triton kernels take of a GPU, by compiling them ahead of time: registers, shared memory, spills. No GPU is needed.

    python -m benchmarks.triton_resources [--write] [--direction forward] [--dtype float16] [--width 64]

The last line is a summary. Exits 1 where a kernel in 16 bits for heads up to 128 wide spills registers to memory; --write puts
the table into docs/kernels-triton.md.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attemper.kernels import triton_backward, triton_forward
from attemper.kernels.spec import Inputs, Needs, Rules, Upstream
from attemper.kernels.triton_problem import Launch
from benchmarks.report import Report, around_markers

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "kernels-triton.md"
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
TARGETS = (80, 90)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDTHS = (16, 32, 64, 80, 128, 256)
PROCESSES = 2
CANDIDATES = 3  # at most, of the tiles that a GPU may choose from

# Up to this width no kernel in 16 bits may spill.
HELD_WIDTH = 128

_POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.uint8: "*u8",
    torch.int32: "*i32",
}


class Variant(NamedTuple):
    """A kind of call. queries: few of them make another kernel of it; everything: a mask, a cap, sinks, a window and dropout."""

    name: str
    queries: int
    statistics: bool
    is_causal: bool = False
    everything: bool = False


VARIANTS = (
    Variant("plain", 1024, statistics=False),
    Variant("causal, statistics", 1024, statistics=True, is_causal=True),
    Variant("all options, statistics", 1024, statistics=True, everything=True),
    Variant("one query, statistics", 1, statistics=True),
)


class Build(NamedTuple):
    """One kernel to compile: what it is for, and where; candidate: which of its tiles, where a GPU has a choice of them."""

    direction: str
    dtype: torch.dtype
    width: int
    variant: Variant
    target: int
    candidate: int = 0


class Resources(NamedTuple):
    """What one compiled kernel takes: registers a thread, bytes of shared memory a program, bytes spilled by stores and loads."""

    kernel: str
    options: str
    registers: int
    shared: int
    spilled: int


def problem(dtype: torch.dtype, width: int, variant: Variant) -> tuple[Inputs, Rules]:
    """A problem without memory, of the sizes that training has."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    keys = 4096
    query, key, value = empty(2, 16, variant.queries, width), empty(2, 16, keys, width), empty(2, 16, keys, width)
    everything = variant.everything
    inputs = Inputs(
        query,
        key,
        value,
        empty(2, 1, variant.queries, keys, dtype=torch.float32) if everything else None,
        empty(2, 16, variant.queries, dtype=torch.float32) if everything else empty(1, 1, 1, dtype=torch.float32),
        empty(16, dtype=torch.float32) if everything else None,
    )
    window = (512, None) if everything else None
    rules = Rules(
        variant.is_causal or everything,
        window,
        softcap=30.0 if everything else None,
        dropout_p=0.1 if everything else 0.0,
        seed=5,
    )
    return inputs, rules


def forward_launches(dtype: torch.dtype, width: int, variant: Variant, candidate: int = 0) -> list[Launch]:
    """The calls of the forward pass, as a call that will be differentiated makes them."""
    inputs, rules = problem(dtype, width, variant)
    statistics = variant.statistics
    return triton_forward.launches(inputs, rules, statistics=statistics, differentiable=True, candidate=candidate)[1]


def backward_launches(dtype: torch.dtype, width: int, variant: Variant, candidate: int = 0) -> list[Launch]:
    """The calls of the backward pass of such a call: with statistics, gradients flow into them too, and a scale has one."""
    inputs, rules = problem(dtype, width, variant)
    result, _ = triton_forward.launches(inputs, rules, statistics=variant.statistics, differentiable=True)
    statistics, everything = variant.statistics, variant.everything
    upstream = Upstream(result.output, *((result.lse, result.entropy) if statistics else (None, None)))
    needs = Needs(query=True, key=True, value=True, mask=everything, scale=statistics, sinks=everything)
    return triton_backward.launches(inputs, rules, result, upstream, needs, candidate=candidate)


# By direction, the calls to compile.
DIRECTIONS: dict[str, Callable[[torch.dtype, int, Variant, int], list[Launch]]] = {
    "forward": forward_launches,
    "backward": backward_launches,
}


def compile_ahead(launch: Launch, target: int) -> Any:
    """What Triton makes of a call for an NVIDIA GPU of compute capability `target`, 80 or 90, specialised as a call would be."""
    signature, constants, attributes = {}, {}, {}
    for parameter in launch.kernel.params:
        name, value = parameter.name, launch.arguments[parameter.name]
        specialised = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (specialised and isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
            continue
        signature[name] = _type_of(value)
        if specialised and (isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)):
            attributes[(parameter.num,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=launch.options)


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


def resources(launch: Launch, target: int) -> Resources:
    """Compile a call, and ask the assembler what it takes."""
    compiled = compile_ahead(launch, target)
    name = re.search(r"\.target\s+(\w+)", compiled.asm["ptx"])
    assert name is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(compiled.asm["ptx"], "utf-8")
        command = [str(PTXAS), "-v", f"--gpu-name={name[1]}", str(path), "-o", str(Path(folder) / "kernel.cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert registers is not None, said
    assert spills is not None, said
    warps, stages = launch.options["num_warps"], launch.options["num_stages"]
    tile = "×".join(str(launch.arguments[block]) for block in ("BLOCK_M", "BLOCK_N") if block in launch.arguments)
    return Resources(
        launch.kernel.__name__,
        f"{tile}, {warps} warps, {stages} stages",
        int(registers[1]),
        compiled.metadata.shared,
        int(spills[1]) + int(spills[2]),
    )


def of_build(build: Build) -> list[Resources]:
    """The resources of every kernel of a build; of another candidate those that no candidate before it has."""
    calls = [DIRECTIONS[build.direction](build.dtype, build.width, build.variant, each) for each in range(build.candidate + 1)]
    before = {_compiled_as(call) for each in calls[:-1] for call in each}
    return [resources(call, build.target) for call in calls[-1] if _compiled_as(call) not in before]


def _compiled_as(launch: Launch) -> str:
    return str([launch.kernel.__name__, launch.options, [pair for pair in launch.arguments.items() if pair[0].isupper()]])


def builds(directions: list[str], dtypes: list[torch.dtype], widths: list[int], variants: list[Variant]) -> Iterator[Build]:
    """All builds to look at."""
    for direction in directions:
        for dtype in dtypes:
            for width in widths:
                for variant in variants:
                    for target in TARGETS:
                        for candidate in range(CANDIDATES):
                            yield Build(direction, dtype, width, variant, target, candidate)


def main() -> int:
    """Compile, print, write on request; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCUMENT.name}")
    parser.add_argument("--direction", action="append", choices=list(DIRECTIONS))
    parser.add_argument("--dtype", action="append", choices=[str(dtype).removeprefix("torch.") for dtype in DTYPES])
    parser.add_argument("--width", action="append", type=int)
    parser.add_argument("--variant", action="append", choices=[variant.name for variant in VARIANTS])
    given = parser.parse_args()
    dtypes = [dtype for dtype in DTYPES if given.dtype is None or str(dtype).removeprefix("torch.") in given.dtype]
    variants = [variant for variant in VARIANTS if given.variant is None or variant.name in given.variant]
    todo = list(builds(given.direction or list(DIRECTIONS), dtypes, given.width or list(WIDTHS), variants))

    report = Report()
    columns = ("dtype    ", "width", "call                   ", "GPU  ", "kernel", "tile                  ")
    table = report.table("What the Triton kernels take", *columns, "registers", "shared, KiB", "spilled, bytes")
    found = held = 0
    spilling = []
    with ProcessPoolExecutor(PROCESSES) as pool:
        for build, kernels in zip(todo, pool.map(of_build, todo), strict=True):
            dtype = str(build.dtype).removeprefix("torch.")
            for each in kernels:
                kernel = each.kernel if build.candidate == 0 else f"{each.kernel}, choice {build.candidate + 1}"
                cells = (dtype, str(build.width), f"{build.direction}, {build.variant.name}", f"sm_{build.target}", kernel)
                table.add(*cells, each.options, str(each.registers), f"{each.shared / 1024:.1f}", str(each.spilled))
                found += 1
                if build.dtype != torch.float32 and build.width <= HELD_WIDTH:
                    held += 1
                    if each.spilled:
                        spilling.append(" ".join(cells))
    summary = f"{found} kernels compiled with Triton {triton.__version__}; of {held} in 16 bits up to a width of {HELD_WIDTH}, "
    summary += f"{len(spilling)} spill registers"
    report.note(summary + "".join(f"\n- {each}" for each in spilling) + ".")
    if given.write:
        before, after = around_markers(DOCUMENT, "triton_resources")
        parts = (part if isinstance(part, str) else part.markdown() for part in report.parts)
        DOCUMENT.write_text(before + "\n\n".join(parts) + "\n" + after, "utf-8")
    print(f"triton_resources: {summary}")
    return 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main())
