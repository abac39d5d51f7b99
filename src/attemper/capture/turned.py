"""Which dimensions of q and k rotary embeddings turn, by what the running modules and their configs say of themselves.

It only decides which norms are measured apart from the others, so a wrong guess costs a measurement and no more.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn

_WIDTHS = ("rotary_ndims", "rotary_dim", "rotary_emb_dim")
_AROUND = 3  # the innermost modules: further out a config may be that of another part


def turned_part(modules: Iterable[nn.Module], width: int) -> slice | None:
    """The turned dimensions of a head, at its beginning or (latent attention) its end; None: all of them, or not known.

    Args:
        modules: the running ones, innermost first; width: of q and k.
    """
    for _, module in zip(range(_AROUND), modules, strict=False):
        for owner in (module, getattr(module, "config", None)):
            at_end = getattr(owner, "qk_rope_head_dim", None)
            if isinstance(at_end, int) and 0 < at_end < width:
                return slice(width - at_end, width)
            for turned in _said(owner, getattr(module, "layer_idx", None), width):
                if 0 < turned < width:
                    return slice(0, turned)
    return None


def _said(owner: Any, layer: Any, width: int) -> Iterable[int]:
    for name in _WIDTHS:
        turned = getattr(owner, name, None)
        if isinstance(turned, int) and not isinstance(turned, bool):
            yield turned
    rope, types = getattr(owner, "rope_parameters", None), getattr(owner, "layer_types", None)
    if isinstance(rope, dict) and isinstance(types, list | tuple) and isinstance(layer, int) and layer < len(types):
        own = rope.get(types[layer])
        rope = own if isinstance(own, dict) else rope
    for share in (rope.get("partial_rotary_factor") if isinstance(rope, dict) else None, _attribute(owner)):
        if isinstance(share, float):
            yield int(width * share)


def _attribute(owner: Any) -> Any:
    try:
        return getattr(owner, "partial_rotary_factor", None)
    except RuntimeError:  # a config whose layers differ refuses some fields
        return None
