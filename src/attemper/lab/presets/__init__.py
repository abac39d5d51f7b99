"""The questions that the lab answers, one module each."""

import importlib

from attemper.errors import ArgumentError
from attemper.lab.presets.preset import Effort, Further, Preset, Product

__all__ = ["NAMES", "Effort", "Further", "Preset", "Product", "preset"]

NAMES = (
    "convergence",
    "lr-sensitivity",
    "logit-threshold",
    "entropy-bound",
    "width-transfer",
    "additive-vs-dot",
    "fp16-overflow",
    "clip-vs-scale",
    "head-widths",
    "length",
    "examples",
)


def preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
        ArgumentError: there is none; the message names all.
    """
    if name not in NAMES:
        raise ArgumentError("preset", repr(name), f"one of {', '.join(NAMES)}")
    found: Preset = importlib.import_module(f"attemper.lab.presets.{name.replace('-', '_')}").PRESET
    return found
