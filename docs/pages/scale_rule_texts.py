"""What the page of a scale rule says that neither its docstring nor the table of uses has."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attemper import scales
from attemper.scales import Scale


@dataclass(frozen=True)
class Words:
    """The words on one rule.

    Attributes:
        formula: of the factor, in LaTeX; variance: of the logits at initialisation, in LaTeX.
        reading: when to use it and how to read it, in MyST.
        calls: how it is written, for the table of figures.
        config: of a model that scales so, as transformers names its fields; empty where no config calls for the rule.
        expected: how the rule is written for that config; layer: the layer whose attention is asked about.
        aside: further mistakes to try on it: words → how what is applied is written.
    """

    formula: str
    variance: str
    reading: str
    calls: tuple[str, ...]
    config: Mapping[str, Any] = field(default_factory=dict)
    expected: str = ""
    layer: int = 0
    aside: Mapping[str, str] = field(default_factory=dict)


_ROPE = "the base alone"

RULES: Mapping[type[Scale], Words] = {
    scales.InverseSqrt: Words(
        formula=r"f = \frac{1}{\sqrt d}",
        variance=r"f^2 d = 1",
        reading=(
            "The rule to take where nothing speaks against it, and what `scale=None` means. It holds the variance of the "
            "logits at 1 whatever the width, as long as entries of q and k are independent and of variance 1. Training undoes "
            "that: trained logits with a standard deviation of 5 are no fault of the rule. d is the width of one head, not of "
            "the model."
        ),
        calls=("InverseSqrt()",),
        config={"model_type": "llama"},
        expected="InverseSqrt()",
    ),
    scales.Constant: Words(
        formula=r"f = c",
        variance=r"c^2 d",
        reading=(
            "Right where something else sets the size of the logits: an initial W_q that has 1/√d inside (T5), or norms on q "
            "and k with learned gains. With neither, the standard deviation of the logits is √d, and rows are saturated before "
            "the first step: how many, [saturated](../statistics/saturated.md) shows at a standard deviation of 8, that of "
            "width 64. Weights trained under it must not be run under 1/√d, nor the other way round."
        ),
        calls=("Constant()", "Constant(0.125)"),
        config={"model_type": "t5"},
        expected="Constant()",
    ),
    scales.Inverse: Words(
        formula=r"f = \frac{m}{d}",
        variance=r"\frac{m^2}{d}",
        reading=(
            "For models whose width grows while the learning rate stays: q and k align in training, q·k then grows like d, and "
            "1/d keeps the logits where they were. The price is paid at the start, where the logits of wide heads are small "
            "and attention is nearly uniform. `Inverse(d0**0.5)` is 1/√d at the width `d0`, at which hyperparameters were "
            "found."
        ),
        calls=("Inverse()", "Inverse(8.0)"),
        config={"model_type": "inkling_text"},
        expected="Inverse()",
    ),
    scales.Sqrt: Words(
        formula=r"f = \sqrt d",
        variance=r"\frac{f^2}{d} = 1 \quad \text{for } \lVert q \rVert = \lVert k \rVert = 1",
        reading=(
            "Only for q and k of length 1: their product is a cosine, whose variance is 1/d. On operands that were not "
            "normalised it multiplies where 1/√d divides, and logits are d times too large. Logits stay within ±√d, so that "
            "the largest weight is bounded too."
        ),
        calls=("Sqrt()",),
        config={"model_type": "ngpt"},
        expected="Sqrt()",
    ),
    scales.InverseSqrtTerms: Words(
        formula=r"f = \frac{1}{\sqrt{n d}}",
        variance=r"\frac{1}{n}",
        reading=(
            "For logits that are a sum: content with content, content with position, position with content. The figure is that "
            "of one product; the whole sum has variance 1. A port that drops the terms of position must not keep their n."
        ),
        calls=("InverseSqrtTerms(3)", "InverseSqrtTerms(0.5)"),
        config={"model_type": "zamba2"},
        expected="InverseSqrtTerms(0.5)",
    ),
    scales.QueryPreAttnScalar: Words(
        formula=r"f = \frac{1}{\sqrt a}",
        variance=r"\frac{d}{a}",
        reading=(
            "The number stands in the config (`query_pre_attn_scalar`) and need not be the head's width: read it, do not "
            "compute it. A port that puts 1/√d in its place is right on the sizes where the two agree and wrong on the others."
        ),
        calls=("QueryPreAttnScalar(144)", "QueryPreAttnScalar(256)"),
        config={"model_type": "gemma2", "query_pre_attn_scalar": 144},
        expected="QueryPreAttnScalar(144)",
    ),
    scales.AttentionMultiplier: Words(
        formula=r"f = a",
        variance=r"a^2 d",
        reading=(
            "The number stands in the config (`attention_multiplier`). It was found at one width and carried to others, so "
            "nothing in the shape of the model tells it. A missing entry means 1.0, which is no scale."
        ),
        calls=("AttentionMultiplier(0.015625)",),
        config={"model_type": "granite", "attention_multiplier": 0.015625},
        expected="AttentionMultiplier(0.015625)",
    ),
    scales.InverseLayer: Words(
        formula=r"f = \frac{f_0}{l + 1}",
        variance=r"\frac{f_0^2\,d}{(l + 1)^2}",
        reading=(
            "For stacks whose activations grow with depth, so that products stay within float16. The first layer is as without "
            "it; a config that switches it off for weights that were trained with it changes every layer but that one. "
            "`rule.at(l)` binds the layer, which the call does not know."
        ),
        calls=("InverseLayer()",),
        config={"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True},
        expected="InverseLayer()",
        layer=5,
        aside={_ROPE: "InverseSqrt()"},
    ),
    scales.Yarn: Words(
        formula=r"f = f_0\,a^2, \qquad a = 0.1 \ln s + 1",
        variance=r"f_0^2\,d\;a^4",
        reading=(
            "For models whose RoPE is stretched by s. Code that multiplies cos and sin by a has the rule already, and passes "
            "1/√d: passing this rule besides would apply it twice. Use it where the rotation carries no factor, or to say what "
            "the whole product is multiplied by. A longer context spreads attention; a² above 1 sharpens it again."
        ),
        calls=("Yarn(4.0)", "Yarn(40.0)"),
        config={"model_type": "llama", "rope_parameters": {"rope_type": "yarn", "factor": 40.0}},
        expected="Yarn(40.0)",
        aside={_ROPE: "InverseSqrt()", "the factor a once": "Constant(64**-0.5 * Yarn(40.0).rope_factor)"},
    ),
    scales.LongRope: Words(
        formula=r"f = f_0\,a^2, \qquad a = \sqrt{1 + \frac{\ln s}{\ln n_0}}",
        variance=r"f_0^2\,d\;a^4",
        reading=(
            "As [Yarn](Yarn.md), with another a, which knows the length n₀ of training: a² is ln(s n₀) / ln n₀, so that logits "
            "grow as the logarithm of the length does."
        ),
        calls=("LongRope(32.0, 4096)", "LongRope(4.0, 8192)"),
        config={
            "model_type": "phi3",
            "rope_parameters": {"rope_type": "longrope", "factor": 32.0, "original_max_position_embeddings": 4096},
        },
        expected="LongRope(32.0, 4096)",
        aside={_ROPE: "InverseSqrt()"},
    ),
    scales.MScale: Words(
        formula=r"f = f_0\,m^2, \qquad m = 0.1\,w \ln s + 1",
        variance=r"f_0^2\,d\;m^4",
        reading=(
            "For multi-head latent attention, where the factor is on the scale and the rotation carries none. d is the width "
            "of the part without RoPE and the part with it together. m² is 1.87 for s = 40: a port without it agrees on texts "
            "of one token and drifts from there."
        ),
        calls=("MScale(40.0)", "MScale(40.0, 0.707)"),
        config={"model_type": "deepseek_v3", "rope_parameters": {"rope_type": "yarn", "factor": 40.0, "mscale_all_dim": 1.0}},
        expected="MScale(40.0)",
        aside={_ROPE: "InverseSqrt()", "m once": "Constant(64**-0.5 * MScale(40.0).mscale)"},
    ),
    scales.Llama4: Words(
        formula=r"f_p = f_0\left(1 + \beta\ln\left(1 + \left\lfloor\frac{p + 1}{L}\right\rfloor\right)\right)",
        variance=r"f_p^2\,d",
        reading=(
            "For layers without RoPE, whose softmax spreads as the context grows. Below position L − 1 it is the base, so that "
            "tests on short texts cannot show whether it is there; check says so in a note. It steps, and is constant between."
        ),
        calls=("Llama4()",),
        config={
            "model_type": "llama4_text",
            "attn_temperature_tuning": True,
            "attn_scale": 0.1,
            "floor_scale": 8,
            "no_rope_layers": [0],
        },
        expected="Llama4(0.1, 8)",
        aside={_ROPE: "InverseSqrt()"},
    ),
    scales.Ministral3: Words(
        formula=r"f_p = f_0\left(1 + \beta\ln\left(1 + \left\lfloor\frac{p}{L}\right\rfloor\right)\right)",
        variance=r"f_p^2\,d",
        reading=(
            "As [Llama4](Llama4.md), in every layer and one position later: code that shares the two is off by one position at "
            "each step. L is the length of training before RoPE was stretched."
        ),
        calls=("Ministral3()", "Ministral3(base=MScale(128.0))"),
        config={
            "model_type": "ministral3",
            "rope_parameters": {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8},
        },
        expected="Ministral3(0.1, 8)",
        aside={_ROPE: "InverseSqrt()"},
    ),
    scales.Inkling: Words(
        formula=r"f_p = f_0\left(1 + \alpha\ln\max\left(\frac{p + 1}{L}, 1\right)\right)",
        variance=r"f_p^2\,d",
        reading=(
            "As [Llama4](Llama4.md), without steps, and on 1/d behind norms on q and k. Only layers that see the whole context "
            "have it. A bias by position is multiplied by the same factor."
        ),
        calls=("Inkling()", "Inkling(base=InverseSqrt())"),
        config={
            "model_type": "inkling_text",
            "layer_types": ["full_attention"],
            "log_scaling_alpha": 0.1,
            "log_scaling_n_floor": 8,
        },
        expected="Inkling(0.1, 8)",
        aside={_ROPE: "Inverse()"},
    ),
    scales.Beam: Words(
        formula=r"f_p = f_0\left(1 + \frac{p + 1}{L}\right)^a",
        variance=r"f_p^2\,d",
        reading=(
            "A power in the place of a logarithm: it differs from the base from the first position on, so that short texts "
            "show it already."
        ),
        calls=("Beam()",),
        config={"model_type": "beam", "layer_types": ["global"], "rope_parameters": {"global": None}},
        expected="Beam()",
        aside={_ROPE: "InverseSqrt()"},
    ),
    scales.Cosine: Words(
        formula=r"f = \exp(\min(s, \ln b))",
        variance=r"\frac{f^2}{d} \quad \text{for } \lVert q \rVert = \lVert k \rVert = 1",
        reading=(
            "Logits are a temperature times a cosine, and never leave ±b: no key gets more than e^(2b) times the weight of "
            "another. Use it with q and k divided by their lengths, and leave weight decay off the temperature, or it drifts "
            "to 1. At the start the temperature is 10: rows can choose from the beginning."
        ),
        calls=("Cosine()",),
        config={"model_type": "swinv2"},
        expected="Cosine()",
    ),
    scales.LogLength: Words(
        formula=r"f_n = f_0\,s \ln n",
        variance=r"f_0^2\,d\,(s \ln n)^2",
        reading=(
            "For models that must keep a key in sight among ever more others: with a fixed scale the weight of one key falls "
            "as n grows, and ln n makes up for it. Start from `initial=1/ln(n)` of the training length where a model goes on "
            "from 1/√d. The first query's factor is 0, which changes nothing, as it has one key."
        ),
        calls=("LogLength()",),
    ),
    scales.Critical: Words(
        formula=r"f_n = f_0\,\gamma \ln n, \qquad \gamma_c = \frac{1}{1 - \rho}",
        variance=r"\frac{(\gamma \ln n)^2}{d} \quad \text{for } \lVert q \rVert = \lVert k \rVert = 1",
        reading=(
            "A rule for thought and for experiments: it says where the edge lies between a softmax that averages and one that "
            "copies. `Critical.at_similarity(rho)` is the edge itself for tokens whose cosine is ρ."
        ),
        calls=("Critical()", "Critical.at_similarity(0.5)"),
    ),
    scales.Learned: Words(
        formula=r"f = f_0 \exp(\min(\max(\theta, \ln a), \ln b))",
        variance=r"f_0^2\,d\;e^{2\theta}",
        reading=(
            "Lets each head find its own sharpness. The factor is positive and bounded; at a bound its gradient is 0, so look "
            "at the parameter where a head stands still. With one factor for all heads it is a temperature of the layer. "
            "Weight decay pulls towards the base, not towards 0."
        ),
        calls=("Learned()", "Learned(initial=2.0)"),
    ),
}
