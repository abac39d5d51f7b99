"""Which rule of `attemper.scales` a config calls for, and what it comes to for the width of q and k, and the layer.

What must hold: a rule is a few lines and reads nothing but its `Site`. Its value is the whole factor between the outputs of the
projections and the logits, wherever the module applies it; `query` and `key` are the parts that the architecture multiplies into
q and k itself, needed where q or k could not be followed back to its projection.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from attemper import scales
from attemper.checker import scale_positions as positions
from attemper.checker.scale_config import rope_attention_factor, rope_parameters, setting, without_rope
from attemper.checker.scale_positions import ByPosition


@dataclass(frozen=True)
class Site:
    """The one attention module that a rule is asked about.

    Attributes:
        config: the configuration object that the module was built from; any object with attributes, or None.
        head_dim: width of q and k at the call (not of v: MLA gives v another width).
        heads: number of query heads at the call.
        layer: number of the layer, from 0; None where it is not known.
    """

    config: Any
    head_dim: int
    heads: int = 1
    layer: int | None = None

    def factor(self, rule: scales.Scale) -> float:
        """What a rule that is one number for the layer makes of q·k here."""
        return float(rule.factor(scales.LogitShape(self.head_dim, self.heads, queries=1, keys=1, layer=self.layer)))


@dataclass(frozen=True)
class Factor:
    """One named factor of a scale beside the base, so that a check can say that exactly this one is missing.

    Attributes:
        name: as it is called in the config; value: the factor on q·k.
        root: what the square root of the value is called, where applying that instead is a known mistake; "" otherwise.
        flag: the field of the config that switches it on and off, "" where there is none.
    """

    name: str
    value: float
    root: str = ""
    flag: str = ""


@dataclass(frozen=True)
class Design:
    """The scale that an architecture calls for, taken apart.

    Attributes:
        base: the part that depends on the width, such as 1/sqrt(d_head); None where it is learned and nothing can be expected.
        factors: further factors on q·k.
        query, key: what the architecture itself multiplies into q and into k after their projections (part of the value).
        folded: the weights are initialised with 1/sqrt(d_head) inside, so any scale on top is a second one.
        position: the factor by position that q is multiplied by as well (no part of the value); None where there is none.
        whole_rope: RoPE turns the whole width of q and k, so a factor on its cos and sin scales every product.
        turned: the factor on the products of the turned dimensions alone, where RoPE is stretched and turns a part of the width
            (no part of the value); None where there is none.
        setting: the field of the config that the base comes from, "" where it is no choice of the config.
        off: factors that the config switches off.
    """

    base: float | None
    factors: tuple[Factor, ...] = ()
    query: float = 1.0
    key: float = 1.0
    folded: bool = False
    position: ByPosition | None = None
    whole_rope: bool = True
    turned: Factor | None = None
    setting: str = ""
    off: tuple[Factor, ...] = ()

    @property
    def value(self) -> float | None:
        """The product of the base and all factors."""
        return None if self.base is None else self.base * math.prod(factor.value for factor in self.factors)


def inverse_sqrt(site: Site) -> Design:
    """1/sqrt(d_head), applied at the call."""
    return Design(site.factor(scales.InverseSqrt()))


def prescaled(site: Site) -> Design:
    """1/sqrt(d_head), multiplied into q; the call is given 1.0."""
    factor = site.factor(scales.InverseSqrt())
    return Design(factor, query=factor)


def both_prescaled(site: Site) -> Design:
    """d_head^(-1/4) on q and again on k; the call is given 1.0."""
    factor = site.factor(scales.InverseSqrt())
    return Design(factor, query=factor**0.5, key=factor**0.5)


def folded(_: Site) -> Design:
    """1.0, because the query projection is initialised with 1/sqrt(d_head) inside."""
    return Design(1.0, folded=True)


def one(_: Site) -> Design:
    """1.0 behind norms on q and k."""
    return Design(1.0)


def inverse_with_log_positions(site: Site) -> Design:
    """1/d_head behind norms on q and k; in global layers q also grows with the logarithm of its position."""
    return Design(site.factor(scales.Inverse()), position=positions.inkling(site.config, site.layer))


def query_pre_attn_scalar(site: Site) -> Design:
    """query_pre_attn_scalar^(-1/2), a number of the config that need not be the head's width (None: the head's width)."""
    scalar = setting(site.config, "query_pre_attn_scalar")
    if scalar is None:
        return inverse_sqrt(site)
    return Design(site.factor(scales.QueryPreAttnScalar(scalar)), setting="query_pre_attn_scalar")


def attention_multiplier(site: Site) -> Design:
    """attention_multiplier, a number of the config (None: 1/sqrt(d_head))."""
    multiplier = setting(site.config, "attention_multiplier")
    if multiplier is None:
        return inverse_sqrt(site)
    return Design(site.factor(scales.AttentionMultiplier(multiplier)), setting="attention_multiplier")


def half_width(site: Site) -> Design:
    """(d_head/2)^(-1/2): the attention reads the hidden state and the embeddings side by side, at twice the width."""
    return Design(site.factor(scales.InverseSqrtTerms(0.5)))


def gpt2(site: Site) -> Design:
    """1/sqrt(d_head) if scale_attn_weights, and 1/(layer+1) if scale_attn_by_inverse_layer_idx."""
    plain = inverse_sqrt(site)
    if not setting(site.config, "scale_attn_weights", True):
        plain = Design(1.0, setting="scale_attn_weights")
    by_inverse = setting(site.config, "scale_attn_by_inverse_layer_idx")
    if site.layer is None:
        return Design(None) if by_inverse else plain
    by_layer = site.factor(scales.InverseLayer(base=scales.Constant()))
    factor = Factor("1/(layer+1) of scale_attn_by_inverse_layer_idx", by_layer, flag="scale_attn_by_inverse_layer_idx")
    if by_inverse:
        return replace(plain, factors=(factor,))
    return plain if by_inverse is None or site.layer == 0 else replace(plain, off=(factor,))


def multi_latent(site: Site) -> Design:
    """1/sqrt(d_nope + d_rope), times mscale^2 where RoPE is stretched: mscale = 0.1 · mscale_all_dim · ln(factor) + 1."""
    rope = rope_parameters(site.config, site.layer)
    base = site.factor(scales.InverseSqrt())
    all_dim, factor = rope.get("mscale_all_dim") or 0, rope.get("factor") or 1
    if rope.get("rope_type", "default") == "default" or not all_dim or factor <= 1:
        return Design(base, whole_rope=False)
    mscale = scales.MScale(factor, all_dim).mscale
    return Design(base, factors=(Factor("mscale^2", mscale**2, root="mscale"),), whole_rope=False)


def multi_latent_by_position(site: Site) -> Design:
    """As `multi_latent`, and q also grows with its position."""
    return replace(multi_latent(site), position=positions.ministral3(site.config, site.layer))


def multi_latent_scaled_latents(site: Site) -> Design:
    """As `multi_latent`, with q multiplied by sqrt(hidden_size / q_lora_rank) after its projection."""
    design = multi_latent(site)
    lift = (site.config.hidden_size / site.config.q_lora_rank) ** 0.5
    return replace(design, factors=(*design.factors, Factor("sqrt(hidden_size/q_lora_rank) on q", lift)), query=lift)


def by_position(site: Site) -> Design:
    """1/sqrt(d_head), and q also grows with its position in layers without RoPE, by a rule of the architecture's own."""
    kind = str(setting(site.config, "model_type", ""))
    return replace(inverse_sqrt(site), position=positions.of(kind, site.config, site.layer))


def deberta(site: Site) -> Design:
    """1/sqrt(d_head · (1 + number of position terms)): c2p and p2c each add a term to the same sum."""
    terms = set(setting(site.config, "pos_att_type") or ()) & {"c2p", "p2c"}
    return Design(site.factor(scales.InverseSqrtTerms(1 + len(terms))))


def mpt(site: Site) -> Design:
    """attn_config.softmax_scale (None: 1/sqrt(d_head))."""
    scale = getattr(setting(site.config, "attn_config"), "softmax_scale", None)
    return inverse_sqrt(site) if scale is None else Design(float(scale), setting="attn_config.softmax_scale")


def padded(site: Site) -> Design:
    """1/sqrt(d_head) with d_head from the config: q and k reach the call padded with zeros to a rounder width."""
    config = site.config
    width = setting(config, "head_dim") or config.hidden_size // config.num_attention_heads
    return Design(width**-0.5, whole_rope=False)


def model_width(site: Site) -> Design:
    """1/sqrt(d_model), on purpose."""
    return Design((site.head_dim * site.heads) ** -0.5)


def inverse_sqrt_heads(site: Site) -> Design:
    """1/sqrt(number of heads), multiplied into q; published so."""
    return Design(site.heads**-0.5, query=site.heads**-0.5)


def sqrt_behind_norm(site: Site) -> Design:
    """sqrt(d_head) on q and k of unit length."""
    return Design(site.factor(scales.Sqrt()))


def qk_scale_factor(site: Site) -> Design:
    """1/sqrt(d_head) · qk_scale_factor, the latter multiplied into q behind its norm."""
    factor = float(setting(site.config, "qk_scale_factor") or 1.0)
    return Design(site.factor(scales.InverseSqrt()), factors=(Factor("qk_scale_factor", factor),), query=factor)


def learned(_: Site) -> Design:
    """A trained parameter: nothing to compare with."""
    return Design(None)


def with_rope(design: Design, site: Site) -> Design:
    """The design, times the factor that a stretched RoPE (YaRN, LongRoPE) puts on cos and sin, once for q and once for k.

    YaRN: 0.1 · ln(factor) + 1, or mscale over mscale_all_dim (Peng et al. 2309.00071, section 3.4); LongRoPE:
    sqrt(1 + ln(factor) / ln(original length)) (Ding et al. 2402.13753); `attention_factor` of the config goes before both.
    Where RoPE turns a part of the width only (partial rotary factors, latent attention), the factor is on the products of that
    part; nothing in layers without RoPE.
    """
    rope = rope_parameters(site.config, site.layer)
    partial = (rope.get("partial_rotary_factor") or setting(site.config, "partial_rotary_factor") or 1.0) < 1.0
    factor = rope_attention_factor(rope, site.config)
    if design.base is None or factor == 1.0 or without_rope(site.config, site.layer):
        return design
    name = f"{rope['rope_type']} attention factor"
    squared = Factor(f"{name} squared", factor**2, root=name)
    if partial or not design.whole_rope:
        return replace(design, turned=squared)
    return replace(design, factors=(*design.factors, squared), query=design.query * factor, key=design.key * factor)
