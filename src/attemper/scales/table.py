"""Who uses which rule: one row for each way in which models scale, from which the page of the documents is made.

A row names the cases of tests/scales/test_huggingface.py that hold it: there a tiny model of the architecture, run by its own
eager code, gives what `attemper.attention` gives under the rule. What is `held` by none has no implementation in transformers.
"""

import inspect
import re
from dataclasses import dataclass

from attemper import scales
from attemper.scales.base import Scale


@dataclass(frozen=True)
class Use:
    """One way in which models scale.

    Attributes:
        rule: the class; written: how it is called for these models.
        architectures: who does so: names of transformers, or papers.
        held: names of the cases that hold it.
    """

    rule: type[Scale]
    written: str
    architectures: str
    held: tuple[str, ...] = ()

    @property
    def formula(self) -> str:
        """The rule as a formula: what its docstring begins with."""
        return (inspect.getdoc(self.rule) or "").partition(": ")[0]

    @property
    def source(self) -> str:
        """Where the rule can be read: what its docstring ends with."""
        found = re.search(r"^Source: (.*)\Z", inspect.getdoc(self.rule) or "", re.MULTILINE | re.DOTALL)
        return " ".join(found[1].split()).removesuffix(".") if found else ""


USES: tuple[Use, ...] = (
    Use(
        scales.InverseSqrt,
        "InverseSqrt()",
        "most: llama, mistral, qwen, phi, bert, vit, clip, …",
        ("llama", "mistral", "phi", "bert", "vit", "clip", "bart", "wav2vec2"),
    ),
    Use(
        scales.InverseSqrt,
        "InverseSqrt()",
        "q is multiplied by it before the call, which is given 1.0: whisper, opt, esm, xglm, qwen2_audio, voxtral, kosmos2_5",
        ("whisper", "opt", "esm", "xglm"),
    ),
    Use(
        scales.InverseSqrt,
        "InverseSqrt()",
        "d^(-1/4) on q and on k: openai_privacy_filter (whose RoPE is stretched by default, see Yarn), LightGlue",
        ("openai_privacy_filter",),
    ),
    Use(
        scales.InverseSqrt,
        "InverseSqrt()",
        "behind norms on q and k, over all heads (olmo2, olmo3) or one (qwen3, cohere, chameleon, stablelm, persimmon)",
        ("olmo2", "qwen3", "cohere"),
    ),
    Use(
        scales.InverseSqrt,
        "InverseSqrt()",
        "beside sinks: gpt_oss (whose RoPE is stretched by default, see Yarn), mimo_v2_flash, deepseek_v4",
        ("gpt_oss",),
    ),
    Use(
        scales.InverseSqrt,
        "InverseSqrt()",
        "with a position bias that is not scaled (bloom) and with one that is scaled too (falcon)",
        ("bloom-alibi", "falcon-alibi"),
    ),
    Use(
        scales.Constant,
        "Constant()",
        "the T5 family, 1/√d being in the initial W_q; gpt_neo, dia",
        ("t5", "mt5", "gpt_neo"),
    ),
    Use(scales.Constant, "Constant()", "behind norms on q and k: gemma3n, gemma4", ("gemma3n", "gemma4")),
    Use(scales.Constant, "Constant(1 / attn_scale)", "TransformerLens, whose attn_scale is a divisor"),
    Use(scales.Inverse, "Inverse(), Inverse(8)", "inkling, behind norms on q and k; muP (often 8/d), u-muP", ("inkling-local",)),
    Use(scales.Sqrt, "Sqrt()", "nGPT, on q and k of length 1"),
    Use(
        scales.QueryPreAttnScalar,
        "QueryPreAttnScalar(query_pre_attn_scalar)",
        "gemma2 (with a softcap), gemma3 (behind norms), t5gemma, vaultgemma",
        ("gemma2", "gemma3", "t5gemma"),
    ),
    Use(
        scales.AttentionMultiplier,
        "AttentionMultiplier(attention_multiplier)",
        "granite, granitemoe, granite_swa, hyperclovax",
        ("granite", "granite_swa"),
    ),
    Use(scales.InverseSqrtTerms, "InverseSqrtTerms(0.5)", "zamba, zamba2", ("zamba2",)),
    Use(scales.InverseSqrtTerms, "InverseSqrtTerms(3)", "deberta, deberta_v2 with c2p and p2c", ("deberta_v2",)),
    Use(scales.InverseSqrtTerms, "InverseSqrtTerms(2)", "deberta, deberta_v2 with one of c2p and p2c", ("deberta_v2-c2p",)),
    Use(
        scales.InverseLayer,
        "InverseLayer()",
        "gpt2, decision_transformer, imagegpt with scale_attn_by_inverse_layer_idx",
        ("gpt2-layer",),
    ),
    Use(
        scales.Yarn,
        "Yarn(factor)",
        "any model whose whole RoPE is stretched by YaRN; gpt_oss and openai_privacy_filter as they ship",
        ("llama-yarn", "llama-yarn-mscale", "gpt_oss-yarn", "openai_privacy_filter-yarn"),
    ),
    Use(
        scales.LongRope, "LongRope(factor, original_length)", "phi3 and any model with RoPE of type longrope", ("phi3-longrope",)
    ),
    Use(
        scales.MScale,
        "MScale(factor, mscale_all_dim)",
        "deepseek_v2, deepseek_v3, minicpm3, youtu, glm4_moe_lite, longcat_flash and other MLA models",
        ("deepseek_v3",),
    ),
    Use(scales.Llama4, "Llama4(attn_scale, floor_scale)", "llama4, in layers without RoPE", ("llama4",)),
    Use(
        scales.Ministral3,
        "Ministral3(llama_4_scaling_beta, original_length)",
        "ministral3; mistral4 with base=MScale(factor)",
        ("ministral3", "mistral4"),
    ),
    Use(
        scales.Inkling,
        "Inkling(log_scaling_alpha, log_scaling_n_floor)",
        "inkling in layers without a window; inkling2 with base=InverseSqrt()",
        ("inkling", "inkling2"),
    ),
    Use(scales.Beam, "Beam()", "beam, in layers without RoPE", ("beam",)),
    Use(scales.Cosine, "Cosine(heads)", "swinv2, swin2sr", ("swinv2",)),
    Use(scales.LogLength, "LogLength(heads)", "SSMax"),
    Use(scales.Critical, "Critical(gamma)", "analysed, in no model known here"),
    Use(scales.Learned, "Learned(heads)", "no model known here; what a gain of a QK-norm that is one number a head amounts to"),
)
