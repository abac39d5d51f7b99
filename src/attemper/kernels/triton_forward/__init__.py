"""The forward pass in Triton: softmax(z) v and the record of z, in one pass over the keys.

What it must hold:
- every figure of the record comes from the logits that made the output, and costs nothing where it is not asked for;
- sums of weights are relative to the row's running maximum, plain sums to a pivot of the row: no common offset cancels in them;
- what a kernel is compiled for follows from dtype, width and options alone: no timing decides, and no thread's luck;
- few queries over many keys are dealt to several programs by keys, and joined by the algebra that joins tiles.
"""

from attemper.kernels.triton_forward.launching import forward, launches
from attemper.kernels.triton_problem import FIGURES

__all__ = ["FIGURES", "forward", "launches"]
