"""Which factor by position an architecture puts on q beside its scale, by its config: the arithmetic is `attemper.scales`'s.

What must hold: a rule is None wherever the layer has no such factor (RoPE layers, windows, switched off by the config).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attemper import scales
from attemper.checker.scale_config import rope_parameters, setting, without_rope
from attemper.scales import LogitShape


@dataclass(frozen=True)
class ByPosition:
    """A factor by position on q.

    Attributes:
        name: what it is called, with the config's fields; rule: the factor alone, on a base of 1.
    """

    name: str
    rule: scales.Scale

    def curve(self, positions: int, first: int = 0) -> Tensor:
        """The factor at so many positions from the first on: [positions], float64."""
        factor = self.rule.factor(LogitShape(head_dim=1, heads=1, queries=positions, keys=first + positions, offset=first))
        return torch.as_tensor(factor, dtype=torch.float64).flatten().expand(positions)


def of(kind: str, config: Any, layer: int | None) -> ByPosition | None:
    """The factor of an architecture by its model_type; None where this layer has none."""
    for beginning, rule in (("llama4", llama4), ("ministral3", ministral3), ("inkling", inkling), ("beam", beam)):
        if kind.startswith(beginning):
            return rule(config, layer)
    return None


def llama4(config: Any, layer: int | None) -> ByPosition | None:
    """1 + attn_scale · ln(1 + floor((p + 1) / floor_scale)) in layers without RoPE, if attn_temperature_tuning."""
    if not setting(config, "attn_temperature_tuning") or not without_rope(config, layer):
        return None
    rule = scales.Llama4(float(config.attn_scale), int(config.floor_scale), base=scales.Constant())
    return ByPosition("attention temperature (attn_temperature_tuning, attn_scale, floor_scale)", rule)


def ministral3(config: Any, layer: int | None) -> ByPosition | None:
    """1 + llama_4_scaling_beta · ln(1 + floor(p / original_max_position_embeddings)), in every layer."""
    rope = rope_parameters(config, layer)
    beta, length = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    if not beta or not length:
        return None
    rule = scales.Ministral3(float(beta), int(length), base=scales.Constant())
    return ByPosition("attention temperature (llama_4_scaling_beta, original_max_position_embeddings)", rule)


def inkling(config: Any, layer: int | None) -> ByPosition | None:
    """1 + log_scaling_alpha · ln(max((p + 1) / log_scaling_n_floor, 1)) in layers without a window."""
    types, floor = setting(config, "layer_types"), setting(config, "log_scaling_n_floor")
    if floor is None or layer is None or not types or layer >= len(types) or "sliding" in types[layer]:
        return None
    rule = scales.Inkling(float(config.log_scaling_alpha), float(floor), base=scales.Constant())
    return ByPosition("logarithmic scaling (log_scaling_alpha, log_scaling_n_floor)", rule)


def beam(config: Any, layer: int | None) -> ByPosition | None:
    """(1 + (p + 1) / 2048)^0.1 in layers without RoPE; both numbers stand in the code."""
    rule = scales.Beam(base=scales.Constant())
    return ByPosition("attention scaling by position", rule) if without_rope(config, layer) else None
