"""Exact edits to trained weights: fold a scale rule into them, clip them, reparametrise them.

`fold_scale` moves a model to an engine with another scale, `qk_clip_` holds logits under a threshold, `spectral_reparam` trains
projections by their spectral norm. Where q and k are projected is read from one table of families; of a layout that is not in
it you say it yourself: `layouts={"blocks.0.attn": Projections(...)}`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attemper.weights.clip import Clip, ClipReport, qk_clip_
    from attemper.weights.edit import Edit
    from attemper.weights.families import find_projections
    from attemper.weights.fold import FoldReport, fold_scale
    from attemper.weights.layout import Heads, Projections
    from attemper.weights.spectral import Reparametrised, SigmaReparam, spectral_reparam

_PLACES = {
    "Clip": "clip",
    "ClipReport": "clip",
    "Edit": "edit",
    "FoldReport": "fold",
    "Heads": "layout",
    "Projections": "layout",
    "Reparametrised": "spectral",
    "SigmaReparam": "spectral",
    "find_projections": "families",
    "fold_scale": "fold",
    "qk_clip_": "clip",
    "spectral_reparam": "spectral",
}
__all__ = [
    "Clip",
    "ClipReport",
    "Edit",
    "FoldReport",
    "Heads",
    "Projections",
    "Reparametrised",
    "SigmaReparam",
    "find_projections",
    "fold_scale",
    "qk_clip_",
    "spectral_reparam",
]


def __getattr__(name: str) -> Any:
    # Most programs edit no weights: importing attemper does not load this.
    if name in _PLACES:
        found = getattr(importlib.import_module(f"attemper.weights.{_PLACES[name]}"), name)
        globals()[name] = found
        return found
    raise AttributeError(f"module 'attemper.weights' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
