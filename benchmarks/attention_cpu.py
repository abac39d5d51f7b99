"""Attention on the CPU: PyTorch's fused one, ours without statistics, ours with all of them, in one process and in turn.

    python -m benchmarks.attention_cpu [THREADS ...]

Every figure is the median of several rounds of (peer, ours, ours with statistics); what counts are the ratios of one row. No bar
is held yet: the ratios depend on the instruction set, which the first line names.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import attemper
from attemper.kernels import cpu

# Each is batch, heads, queries, keys, width.
SHAPES = (
    (1, 8, 2048, 2048, 128),
    (1, 4, 4096, 4096, 64),
    (8, 12, 128, 128, 64),
    (1, 8, 2048, 2048, 80),
    (1, 32, 1, 4096, 128),
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDS = 5
SLOWEST_BACKWARD = 60e9  # operations; torch's own 16-bit backward takes minutes beyond it


def main(threads: list[int]) -> int:
    """Print one table for each number of threads."""
    print(
        f"attemper {attemper.__version__}, {cpu.describe()}; torch {torch.__version__}; medians of {ROUNDS} rounds, milliseconds"
    )
    for count in threads:
        torch.set_num_threads(count)
        print(f"\n{count} thread{'s' if count > 1 else ''}")
        print(f"{'B, H, Nq, Nk, D':<22} {'dtype':<9} {'mask':<7} {'SDPA':>8} {'ours':>8} {'+ stats':>8}", end=" ")
        print(f"{'SDPA/+stats':>11} {'cost of stats':>13}   {'SDPA bwd':>8} {'ours bwd':>8} {'ratio':>6}")
        for shape in SHAPES:
            for dtype in DTYPES:
                for causal in (False, True) if shape[2] > 1 else (False,):
                    print(row(shape, dtype, causal), flush=True)
    return 0


def row(shape: tuple[int, int, int, int, int], dtype: torch.dtype, causal: bool) -> str:
    """One line of the table."""
    batch, heads, queries, keys, width = shape
    torch.manual_seed(0)
    query = torch.randn(batch, heads, queries, width).to(dtype)
    key, value = (torch.randn(batch, heads, keys, width).to(dtype) for _ in range(2))
    peer, ours, full = medians(
        lambda: F.scaled_dot_product_attention(query, key, value, is_causal=causal),
        lambda: attemper.attention(query, key, value, is_causal=causal, impl="cpu"),
        lambda: attemper.attention(query, key, value, is_causal=causal, return_stats=True, impl="cpu"),
    )
    name = str(dtype).removeprefix("torch.")
    text = f"{', '.join(map(str, shape)):<22} {name:<9} {'causal' if causal else 'full':<7} {peer:8.2f} {ours:8.2f} {full:8.2f} "
    text += f"{peer / full:10.2f}x {100 * (full / ours - 1):12.1f}%"
    operations = 4.0 * batch * heads * queries * keys * width
    if queries == 1 or (dtype == torch.float16 and operations > SLOWEST_BACKWARD / 10) or operations > SLOWEST_BACKWARD:
        return text
    return text + "   " + backward(query, key, value, causal)


def backward(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> str:
    """The last three columns."""
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    theirs = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
    own, _ = attemper.attention(query, key, value, is_causal=causal, return_stats=True, impl="cpu")
    upstream = torch.randn_like(own)
    peer, ours = medians(
        lambda: torch.autograd.grad(theirs, leaves, upstream, retain_graph=True),
        lambda: torch.autograd.grad(own, leaves, upstream, retain_graph=True),
    )
    return f"{peer:8.2f} {ours:8.2f} {peer / ours:5.2f}x"


def medians(*functions: Callable[[], object]) -> list[float]:
    """Milliseconds of each, measured in turn."""
    for function in functions:
        function()
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(ROUNDS):
        for column, function in zip(times, functions, strict=True):
            began = time.perf_counter()
            function()
            column.append(1e3 * (time.perf_counter() - began))
    return [statistics.median(column) for column in times]


if __name__ == "__main__":
    sys.exit(main([int(number) for number in sys.argv[1:]] or [1, 2]))
