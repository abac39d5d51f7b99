"""Attention over a sequence that two processes share out: torchrun --standalone --nproc-per-node 2 examples/ring_attention.py."""

import torch
import torch.distributed as dist

import attemper
from attemper.nn import ring_attention, ring_shard

BATCH, HEADS, POSITIONS, WIDTH = 2, 4, 1021, 32


def main() -> None:
    """Compute it in parts and on one process, and compare the two."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same whole on every process, of which each then keeps its part
    whole = [torch.randn(BATCH, HEADS, POSITIONS, WIDTH, requires_grad=True) for _ in range(3)]
    parts = [ring_shard(each.detach(), layout="zigzag").requires_grad_() for each in whole]

    output, rows = ring_attention(*parts, is_causal=True, layout="zigzag", return_stats=True)
    output.sum().backward()

    expected, record = attemper.attention(*whole, is_causal=True, return_stats=True)
    expected.sum().backward()
    errors = [(output - ring_shard(expected, layout="zigzag")).abs().max().item()]
    errors += [
        (own.grad - ring_shard(each.grad, layout="zigzag")).abs().max().item() for own, each in zip(parts, whole, strict=True)
    ]
    same = torch.equal(rows.max, ring_shard(record.max, -1, layout="zigzag"))
    if max(errors) > 1e-4 or not same:
        raise SystemExit(f"differs from one process: {errors}, maxima to the bit: {same}")
    if dist.get_rank() == 0:
        count = output.shape[-2]
        print(f"{dist.get_world_size()} processes, {count} of {POSITIONS} positions on the first: the same as on one")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
