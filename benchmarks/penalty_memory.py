"""Peak memory of attention with a z-loss and an entropy floor, forward and backward: ours beside weights that are written down.

    python -m benchmarks.penalty_memory

Each figure comes from a process of its own, beyond the inputs. The bars: the penalties add less than a twentieth of one matrix of
logits to attention without them, and all of it stays under a tenth of what the written-down form takes. Exit 1 if one is missed.
"""

import subprocess
import sys

import torch
from torch import Tensor

import attemper
from attemper.nn import entropy_floor, z_loss
from benchmarks.memory import HEADS, MIB, WIDTH, Job, inputs, peak

LENGTHS = (1024, 2048, 4096)


def main() -> int:
    """Print the table; 1 if a bar is missed."""
    print(f"batch 1, heads {HEADS}, width {WIDTH}, float32, causal; MiB beyond inputs, forward and backward, 1 thread")
    print(f"{'N':>6}  {'without':>8}  {'with':>8}  {'written down':>12}  {'one N x N matrix':>16}")
    good = True
    for length in LENGTHS:
        without, ours, eager = (measured(kind, length) for kind in ("without", "ours", "eager"))
        matrix = HEADS * length * length * 4 / MIB
        print(f"{length:>6}  {without:>8.1f}  {ours:>8.1f}  {eager:>12.0f}  {matrix:>16.0f}")
        if length == LENGTHS[-1]:
            good = ours - without < matrix / 20 and ours < eager / 10
    return 0 if good else 1


def measured(kind: str, length: int) -> float:
    """MiB, from a fresh process."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.penalty_memory", kind, str(length)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(kind: str, length: int) -> float:
    """Run once, after a small one has loaded what loads lazily."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    _step(kind, *inputs(Job("auto", HEADS, 64, WIDTH)))
    query, key, value = inputs(Job("auto", HEADS, length, WIDTH))
    before = peak()
    _step(kind, query, key, value)
    return peak() - before


def _step(kind: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    if kind == "eager":
        output, penalty = _written_down(query, key, value)
    else:
        output, rows = attemper.attention(query, key, value, is_causal=True, return_stats=True)
        penalty = z_loss(rows) + entropy_floor(rows, 0.9) if kind == "ours" else output.new_zeros(())
    (output.sum() + penalty).backward()


def _written_down(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    hidden = torch.ones(query.shape[-2], query.shape[-2], dtype=torch.bool).triu(1)
    logits = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
    weights, lse = logits.softmax(-1), logits.logsumexp(-1)
    entropy = -(weights * (logits - lse.unsqueeze(-1)).masked_fill(hidden, 0.0)).sum(-1)[..., 1:]
    share = entropy / torch.arange(2, query.shape[-2] + 1).log()
    return weights @ value, lse[..., 1:].square().mean() + (0.9 - share).clamp(min=0.0).square().mean()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(measure(sys.argv[1], int(sys.argv[2])))
    else:
        sys.exit(main())
