"""The backward pass in Triton: logits again, tile by tile, and what flows back through them.

What it must hold:
- what a program sums, it alone writes: no atomics, so that the same call gives the same bits;
- the gradients of keys and values are summed over the query heads of a group inside the kernel;
- weights come from the largest logit and log Σ e^(z − max) apart, since their sum rounds away at large logits;
- what is not finite reaches only rows and keys that see it.
"""

from attemper.kernels.triton_backward.launching import backward, launches

__all__ = ["backward", "launches"]
