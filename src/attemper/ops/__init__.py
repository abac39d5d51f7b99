"""Attention as users call it: arguments checked, an implementation chosen, gradients joined to autograd."""

from attemper.ops.arguments import Problem, Window
from attemper.ops.attention import LISTENERS, attention, row_stats
from attemper.ops.autocast import without_autocast
from attemper.ops.implementations import IMPLEMENTATIONS, Implementation

__all__ = ["IMPLEMENTATIONS", "LISTENERS", "Implementation", "Problem", "Window", "attention", "row_stats", "without_autocast"]
