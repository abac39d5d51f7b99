"""RoPE turns and keeps lengths; YaRN stretches them on purpose, and so the logits."""

from dataclasses import dataclass

import torch

from attemper.lesson.figures import Figure, Measured, Point, estimates, exact, over_seeds
from attemper.nn import RotaryEmbedding
from attemper.nn.rope_rules import YarnRope
from attemper.ops.attention import row_stats
from attemper.scales import Yarn
from attemper.scales.base import LogitShape
from attemper.scales.rotary import mscale

_KEYS, _WIDTH = 256, 64
_STRETCHES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, kw_only=True)
class RopeYarn(Measured):
    """Figures: length after RoPE over length before; spread of the logits without and with it; what YaRN multiplies them by.

    That is measured, and by its own formula; by DeepSeek-V2's as well.
    """

    length_ratio: Figure
    std_plain: Figure
    std_rope: Figure
    yarn_ratio_4: Figure
    yarn_ratio_16: Figure
    yarn_rule_4: Figure
    yarn_rule_16: Figure
    yarn_rule_40: Figure
    yarn_rule_v2: Figure


def measure(seed: int) -> RopeYarn:
    """Measure with random numbers of this seed."""
    samples = over_seeds(_once, seed, 12)
    figures = estimates(samples, std_plain=".2f", std_rope=".2f")
    # Ratios of one drawing of q and k to itself: amplitude² at every position up to float32 rounding, and no seed's matter.
    ratios = {f"yarn_ratio_{s}": _same(samples[f"yarn_ratio_{s}"]) for s in (4, 16)}
    rules = {f"yarn_rule_{s}": exact(_rule(s), ".3f") for s in (4, 16, 40)}
    rules["yarn_rule_v2"] = exact(mscale(40, 0.707) ** 2, ".3f")  # its config: rope_scaling.mscale_all_dim and factor
    points = [Point(s, _same(samples[f"yarn_ratio_{s}"]).value, "yarn") for s in _STRETCHES]
    points += [Point(s, 1.0, "rope") for s in _STRETCHES]
    return RopeYarn(points=tuple(points), length_ratio=_same(samples["length_ratio"]), **figures, **ratios, **rules)


def _same(values: list[float]) -> Figure:
    assert max(values) - min(values) < 1e-4
    return exact(round(values[0], 4), ".3f")


def _rule(stretch: float) -> float:
    """What YaRN multiplies the logits with: its rule over the one that it stands on."""
    shape = LogitShape(_WIDTH, 1, _KEYS, _KEYS)
    return float(Yarn(stretch).factor(shape)) * _WIDTH**0.5


def _once(_seed: int) -> dict[str, float]:
    query, key = torch.randn(2, 1, 1, _KEYS, _WIDTH)
    rope = RotaryEmbedding(_WIDTH)
    turned = rope(query), rope(key)
    found = {
        "length_ratio": (turned[0].norm(dim=-1) / query.norm(dim=-1)).mean().item(),
        "std_plain": _spread(query, key),
        "std_rope": _spread(*turned),
    }
    for stretch in _STRETCHES:
        yarn = RotaryEmbedding(_WIDTH, rule=YarnRope(float(stretch), 4096))
        # At its own place each vector meets itself: turned alike, so that only the amplitude is left of the product.
        found[f"yarn_ratio_{stretch}"] = (yarn(query).square().sum(-1) / query.square().sum(-1)).mean().item()
    return found


def _spread(query: torch.Tensor, key: torch.Tensor) -> float:
    rows = row_stats(query, key)
    return (rows.var + rows.mean.square()).mean().sqrt().item()
