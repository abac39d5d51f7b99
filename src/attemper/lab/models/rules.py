"""The dial: from the name of a rule to the object of `attemper.scales` that one attention layer asks for its factor."""

from __future__ import annotations

import math
from statistics import fmean

from attemper.lab.config import Model
from attemper.scales import Constant, Cosine, Inverse, InverseSqrt, Learned, LogLength, Scale


def rule_of(config: Model, tokens: int, causal: bool) -> Scale:
    """A rule of its own for one attention layer; learned ones are modules with parameters.

    Args:
        config: whose `rule` it is.
        tokens: length of the training examples, at which the rules in ln n start as 1/√d.
        causal: whether a query sees the keys up to its own position, or all.
    """
    heads = config.heads
    # ln 1 would be no length to measure others by.
    slope = 1.0 / math.log(max(2, tokens))
    match config.rule:
        case "none":
            return Constant(1.0)
        case "inverse_sqrt":
            return InverseSqrt()
        case "inverse":
            return Inverse()
        case "mup":
            return Inverse(math.sqrt(config.mup_base))
        case "learned":
            return Learned(heads)
        case "cosine":
            return Cosine(heads)
        case "log_length_learned":
            return LogLength(heads, initial=slope, causal=causal)
        case "log_length":
            fixed = LogLength(initial=slope, causal=causal)
            fixed.requires_grad_(False)
            return fixed


def shared_width(config: Model) -> int | None:
    """The width that every head's rule is asked with, where they share one: the mean of theirs, rounded; None: each its own."""
    if config.own_scales or isinstance(config.head_dim, int):
        return None
    return round(fmean(config.head_dim))
