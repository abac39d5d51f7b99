"""Attention tile by tile in plain PyTorch: O(N·d) memory, any device, forward and backward.

What it must hold:
- no tensor of queries × keys elements exists beyond one tile;
- the maximum is subtracted before anything is multiplied in, and the backward pass gets it and Σ e^(z − max) apart, since lse,
  their sum in logarithms, rounds away at large logits;
- sums within a tile start from zero and are then added to the running ones, which keeps their error from growing with N;
- mean and variance are formed in two passes within a tile and joined by Chan's rule, so that a common offset does not cancel.
"""

from attemper.kernels.blocked.backward import backward
from attemper.kernels.blocked.forward import FIGURES, LIKE_INPUTS, forward

__all__ = ["FIGURES", "LIKE_INPUTS", "backward", "forward"]
