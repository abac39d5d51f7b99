"""Attention as users call it: arguments checked, an implementation chosen, gradients joined to autograd."""

from attemper.ops.arguments import Problem, Window
from attemper.ops.attention import attention, row_stats
from attemper.ops.autocast import without_autocast
from attemper.ops.implementations import IMPLEMENTATIONS, Implementation, check_name
from attemper.ops.listening import LISTENERS, Listener
from attemper.ops.materialised import attention_with_weights

__all__ = [
    "IMPLEMENTATIONS",
    "LISTENERS",
    "Implementation",
    "Listener",
    "Problem",
    "Window",
    "attention",
    "attention_with_weights",
    "check_name",
    "row_stats",
    "without_autocast",
]
