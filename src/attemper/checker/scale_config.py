"""What a scale rule reads of a model's config: its fields, RoPE's settings of one layer, and the factor on its cos and sin."""

from typing import Any

from attemper import scales


def setting(config: Any, name: str, default: Any = None) -> Any:
    """A field of a config, or the default; a config whose layers differ refuses some fields with a RuntimeError."""
    try:
        return getattr(config, name, default)
    except RuntimeError:
        return default


def rope_parameters(config: Any, layer: int | None) -> dict[str, Any]:
    """The RoPE settings of one layer: config.rope_parameters (or rope_scaling), which may hold one dictionary a layer type."""
    found = setting(config, "rope_parameters") or setting(config, "rope_scaling") or {}
    types = setting(config, "layer_types")
    if layer is not None and types and layer < len(types) and isinstance(found.get(types[layer]), dict):
        found = found[types[layer]]
    return {**found, "rope_type": found.get("rope_type", found.get("type", "default"))}


def without_rope(config: Any, layer: int | None) -> bool:
    """Whether this layer has no rotary embedding while others have: Llama 4's no_rope_layers (0: none), Beam's layer types."""
    if layer is None:
        return False
    listed, types = setting(config, "no_rope_layers"), setting(config, "layer_types")
    if listed and layer < len(listed):
        return not listed[layer]
    found = setting(config, "rope_parameters") or {}
    return bool(types) and layer < len(types) and types[layer] in found and found[types[layer]] is None


def rope_attention_factor(rope: dict[str, Any], config: Any) -> float:
    """The factor on cos and sin, 1.0 where nothing is stretched."""
    kind, given = rope["rope_type"], rope.get("attention_factor")
    if kind not in ("yarn", "longrope") or rope.get("short_mscale") is not None:  # Phi-3.5-MoE brings two factors of its own
        return 1.0
    if given is not None:
        return float(given)
    original = rope.get("original_max_position_embeddings") or setting(config, "original_max_position_embeddings")
    longest = setting(config, "max_position_embeddings")
    stretch = rope.get("factor") or (longest / original if longest and original else 1.0)
    if stretch <= 1.0:
        return 1.0
    if kind == "longrope":
        return scales.LongRope(stretch, original).rope_factor if original else 1.0
    return scales.Yarn(stretch, rope.get("mscale") or None, rope.get("mscale_all_dim") or None).rope_factor
