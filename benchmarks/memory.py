"""Peak memory of attention, forward and backward, beyond what was there before: blocked beside materialised.

    python -m benchmarks.memory

Each figure comes from a process of its own (the peak never comes down again). The bars: from N = 8192 to 16384 the blocked
kernel's peak grows no more than in proportion to N, and stays under a tenth of one materialised matrix of logits. Exit 1 if one
is missed. The compiled kernel's bars are held by `benchmarks.attention_cpu`.
"""

import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import attemper

HEADS, WIDTH = 2, 64
LENGTHS = (4096, 8192, 16384)
EAGER_UP_TO = 4096  # beyond it the materialised form needs more than most machines have to spare
MIB = 2**20


class Job(NamedTuple):
    """One measurement."""

    impl: str
    heads: int
    length: int
    width: int
    dtype: str = "float32"
    causal: int = 1
    backward: int = 1
    threads: int = 1


class Growth(NamedTuple):
    """How far the peak rose above the inputs, MiB: in the forward pass, in both passes, and what of it was not returned.

    both, scratch_of_both: what the forward pass keeps for the backward pass, and whatever else outlives it, is in them.
    """

    forward: float
    both: float
    scratch: float
    scratch_of_both: float


def main() -> int:
    """Print the table; 1 if a bar is missed."""
    threads = torch.get_num_threads()
    print(f"batch 1, heads {HEADS}, width {WIDTH}, float32, causal, statistics on; MiB beyond inputs, {threads} threads")
    print(f"{'N':>6}  {'blocked fwd':>11}  {'blocked fwd+bwd':>15}  {'materialised fwd+bwd':>20}  {'one N x N matrix':>16}")
    both = {}
    for length in LENGTHS:
        blocked = Job("blocked", HEADS, length, WIDTH, threads=threads)
        forward = measured(blocked._replace(backward=0)).forward
        both[length] = measured(blocked).both
        eager = f"{measured(blocked._replace(impl='reference')).both:.0f}" if length <= EAGER_UP_TO else "-"
        matrix = HEADS * length * length * 4 / MIB
        print(f"{length:>6}  {forward:>11.0f}  {both[length]:>15.0f}  {eager:>20}  {matrix:>16.0f}")
    growth, matrix = both[16384] / both[8192], HEADS * 16384 * 16384 * 4 / MIB
    print(f"16384 against 8192: {growth:.2f} times; against one matrix of logits: 1/{matrix / both[16384]:.0f}")
    return 0 if growth <= 2.0 and both[16384] < matrix / 10 else 1


def measured(job: Job) -> Growth:
    """The figures of one job, from a fresh process."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.memory", *map(str, job)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{job} exited {done.returncode}:\n{done.stderr}")
    return Growth(*map(float, done.stdout.split()))


def measure(job: Job) -> Growth:
    """Run once, after a small call of another kernel has loaded all that loads lazily.

    Of another, so that what the measured one allocates once and keeps is counted.
    """
    torch.set_num_threads(job.threads)
    torch.manual_seed(0)
    torch.randn(2**20).exp().sum()  # starts the threads
    leaves = inputs(job._replace(length=64))
    small, _ = attemper.attention(*leaves, return_stats=True, impl="blocked")
    torch.autograd.grad(small, leaves, torch.ones_like(small))
    query, key, value = inputs(job)
    before = peak()
    output, rows = attemper.attention(query, key, value, is_causal=bool(job.causal), return_stats=True, impl=job.impl)
    returned = [output, rows.lse, rows.entropy, rows.rest]
    forward = peak() - before
    scratch = forward - size(returned)
    if not job.backward:
        return Growth(forward, forward, scratch, scratch)
    upstream = torch.ones_like(output)
    gradients = torch.autograd.grad(output, (query, key, value), upstream)
    both = peak() - before
    return Growth(forward, both, scratch, both - size([*returned, upstream, *gradients]))


def inputs(job: Job) -> tuple[Tensor, Tensor, Tensor]:
    """Leaves of one length, made in place: a conversion would leave a peak behind."""
    dtype = getattr(torch, job.dtype)
    query, key, value = (torch.randn(1, job.heads, job.length, job.width, dtype=dtype).requires_grad_() for _ in range(3))
    return query, key, value


def size(tensors: list[Tensor]) -> float:
    """Bytes of all, in MiB."""
    return sum(tensor.nbytes for tensor in tensors) / MIB


def peak() -> float:
    """Largest resident size of this process so far, MiB.

    Where Linux tells it, not by getrusage: there a process starts with the peak of the one that started it.
    """
    status = Path("/proc/self/status")
    if status.exists() and (found := re.search(r"^VmHWM:\s*(\d+) kB$", status.read_text(), re.MULTILINE)):
        return int(found[1]) * 1024 / MIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / MIB


if __name__ == "__main__":
    if len(sys.argv) > 1:
        impl, heads, length, width, dtype, causal, backward, threads = sys.argv[1:]
        print(*measure(Job(impl, int(heads), int(length), int(width), dtype, int(causal), int(backward), int(threads))))
    else:
        sys.exit(main())
