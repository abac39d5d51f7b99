"""Peak memory of attention, forward and backward, beyond what was there before: blocked beside materialised.

    python -m benchmarks.memory

Each figure comes from a process of its own (the peak never comes down again). The bars: from N = 8192 to 16384 the blocked
kernel's peak grows no more than in proportion to N, and stays under a tenth of one materialised matrix of logits. Exit 1 if one
is missed.
"""

import resource
import subprocess
import sys

import torch

import attemper

HEADS, WIDTH = 2, 64
LENGTHS = (4096, 8192, 16384)
EAGER_UP_TO = 4096  # beyond it the materialised form needs more than most machines have to spare
MIB = 2**20


def main() -> int:
    """Print the table; 1 if a bar is missed."""
    threads = torch.get_num_threads()
    print(f"batch 1, heads {HEADS}, width {WIDTH}, float32, causal, statistics on; MiB beyond inputs, {threads} threads")
    print(f"{'N':>6}  {'blocked fwd':>11}  {'blocked fwd+bwd':>15}  {'materialised fwd+bwd':>20}  {'one N x N matrix':>16}")
    both = {}
    for length in LENGTHS:
        forward = measured("blocked", length, backward=False)
        both[length] = measured("blocked", length, backward=True)
        eager = f"{measured('reference', length, backward=True):.0f}" if length <= EAGER_UP_TO else "-"
        matrix = HEADS * length * length * 4 / MIB
        print(f"{length:>6}  {forward:>11.0f}  {both[length]:>15.0f}  {eager:>20}  {matrix:>16.0f}")
    growth, matrix = both[16384] / both[8192], HEADS * 16384 * 16384 * 4 / MIB
    print(f"16384 against 8192: {growth:.2f} times; against one matrix of logits: 1/{matrix / both[16384]:.0f}")
    return 0 if growth <= 2.0 and both[16384] < matrix / 10 else 1


def measured(impl: str, length: int, *, backward: bool) -> float:
    """Peak MiB beyond the inputs, in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.memory", impl, str(length), str(int(backward))]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(impl: str, length: int, backward: bool) -> None:
    """Run once and print the growth of the peak, after a small call has loaded all that loads lazily."""
    torch.manual_seed(0)
    attend(impl, *inputs(64), backward)
    query, key, value = inputs(length)
    before = peak()
    attend(impl, query, key, value, backward)
    print(peak() - before)


def inputs(length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Leaves of one length."""
    query, key, value = (torch.randn(1, HEADS, length, WIDTH).requires_grad_() for _ in range(3))
    return query, key, value


def attend(impl: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, backward: bool) -> None:
    """Attention with statistics, and its gradients where asked for."""
    output, _ = attemper.attention(query, key, value, is_causal=True, return_stats=True, impl=impl)
    if backward:
        output.sum().backward()


def peak() -> float:
    """Largest resident size of this process so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / MIB


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1")
    else:
        sys.exit(main())
