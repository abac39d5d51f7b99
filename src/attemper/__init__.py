"""attemper: attention you can see into, and keep in range.

Attention is softmax(scale·q·kᵀ)·v. attemper computes it and hands back exact statistics of the logits, and with them checks
models: see `attention`, `RowStats` and `check`; `use` puts it into a model that is there. Its scale rules are in `scales`, its
modules in `nn`, edits to trained weights in `weights`; `watch` measures a model while it trains, and `QKClip` holds its
logits under a threshold.
"""

import importlib
from typing import TYPE_CHECKING, Any

from attemper import scales
from attemper.ops import attention
from attemper.stats import HeadStats, RowStats, merge

if TYPE_CHECKING:
    from attemper import nn, weights
    from attemper.capture.using import use
    from attemper.checker import check
    from attemper.monitor import QKClip, watch

__version__ = "0.1.0"
__all__ = ["HeadStats", "QKClip", "RowStats", "attention", "check", "merge", "nn", "scales", "use", "watch", "weights"]


def __getattr__(name: str) -> Any:
    # check stands on optional packages: importing attemper must not import them.
    if name == "check":
        from attemper.checker import check

        return check
    # Nor do programs that only call attention need the modules, edits to weights, or the seams of models.
    if name == "use":
        from attemper.capture.using import use

        return use
    if name in ("QKClip", "watch"):
        return getattr(importlib.import_module("attemper.monitor"), name)
    if name in ("nn", "weights"):
        return importlib.import_module(f"attemper.{name}")
    raise AttributeError(f"module 'attemper' has no attribute {name!r}; it has {', '.join(__all__)}")
