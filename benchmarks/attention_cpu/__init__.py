"""Attention on the CPU against PyTorch's own: `python -m benchmarks.attention_cpu`."""
