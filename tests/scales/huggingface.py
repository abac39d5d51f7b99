"""Tiny Hugging Face models with the rule that each follows, and what their own eager attention was given and gave.

`run` gives a model's calls: q and k as they were before anything scaled them, the rest of the call, and the result. Where a
model scales q or k by a constant itself, capture measures that; where by position, a twin without it says what q was.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attemper import scales
from attemper.capture import AttentionCall, capture
from attemper.scales import Scale
from tests.capture.architectures import _MLA, _OWN_WIDTH, ARCHITECTURES, TOKENS, VOCABULARY, build
from tests.capture.watching import logged_results

_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 2}
_PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 3, "long_factor": [1.5] * 3}
_MISTRAL4_ROPE = _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3, "max_position_embeddings": 32}

# Models that the sweep has not: class, config's class, config.
_OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "inkling": (
        "InklingForCausalLM",
        "InklingTextConfig",
        _OWN_WIDTH
        | {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 7, "sliding_window_size": 3, "d_rel": 5}
        | {"rel_extent": 7, "log_scaling_n_floor": 4, "log_scaling_alpha": 0.3, "layer_types": ["hybrid", "hybrid_sliding"]}
        | {"mlp_layer_types": ["dense", "dense"], "moe_intermediate_size": 40, "n_routed_experts": 3, "n_shared_experts": 1},
    ),
    "beam": (
        "BeamForCausalLM",
        "BeamConfig",
        _OWN_WIDTH
        | {"layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["dense", "dense"], "sliding_window": 3},
    ),
    "mistral4": ("Mistral4ForCausalLM", "Mistral4Config", _MLA | {"rope_parameters": _MISTRAL4_ROPE}),
}


@dataclass(frozen=True)
class Case:
    """One model and its rule.

    Attributes:
        name: what the table of the documents calls it; architecture: which model, if not that of the same name.
        config: fields on top of the tiny config; neutral: fields that take out what depends on position, for the twin.
        calls: which calls of the model follow the rule; of a twin only the first, whose input is the same.
    """

    name: str
    rule: Scale
    architecture: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    neutral: dict[str, Any] = field(default_factory=dict)
    calls: tuple[int, int | None] = (0, None)


_FIRST = (0, 1)

CASES = (
    *(Case(name, scales.InverseSqrt()) for name in ("llama", "mistral", "phi", "bert", "vit", "clip", "bart", "wav2vec2")),
    *(Case(name, scales.InverseSqrt()) for name in ("whisper", "opt", "esm", "olmo2", "qwen3", "cohere")),
    Case("gpt_oss", scales.InverseSqrt(), config=_PLAIN_ROPE),
    Case("openai_privacy_filter", scales.InverseSqrt(), config=_PLAIN_ROPE),
    *(Case(name, scales.Constant()) for name in ("t5", "mt5", "gemma3n", "gemma4")),
    *(Case(name, scales.QueryPreAttnScalar(17)) for name in ("gemma2", "gemma3", "t5gemma")),
    Case("granite", scales.AttentionMultiplier(0.0625)),
    Case("granite_swa", scales.AttentionMultiplier(0.31), config={"attention_multiplier": 0.31}),
    Case("zamba2", scales.InverseSqrtTerms(0.5)),
    Case("gpt2-layer", scales.InverseLayer(), "gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    Case("llama-yarn", scales.Yarn(16.0), "llama", {"rope_parameters": _YARN}),
    Case(
        "llama-yarn-mscale",
        scales.Yarn(16.0, 1.3, 0.4),
        "llama",
        {"rope_parameters": _YARN | {"mscale": 1.3, "mscale_all_dim": 0.4}},
    ),
    Case("gpt_oss-yarn", scales.Yarn(32.0), "gpt_oss"),
    Case("openai_privacy_filter-yarn", scales.Yarn(32.0), "openai_privacy_filter"),
    Case(
        "phi3-longrope",
        scales.LongRope(4.0, 16),
        "phi3",
        {"max_position_embeddings": 64, "original_max_position_embeddings": 16, "rope_parameters": _LONG | {"factor": 4.0}},
    ),
    Case("deepseek_v3", scales.MScale(40.0)),
    Case(
        "llama4",
        scales.Llama4(0.3, 4),
        config={"no_rope_layers": [0, 1]},
        neutral={"attn_temperature_tuning": False},
        calls=_FIRST,
    ),
    Case(
        "ministral3",
        scales.Ministral3(0.3, 2, base=scales.Yarn(16.0)),
        config={"rope_parameters": _YARN | {"llama_4_scaling_beta": 0.3}},
        neutral={"rope_parameters": _YARN | {"llama_4_scaling_beta": 0.0}},
        calls=_FIRST,
    ),
    Case(
        "mistral4",
        scales.Ministral3(0.3, 2, base=scales.MScale(16.0)),
        neutral={"rope_parameters": _MISTRAL4_ROPE | {"llama_4_scaling_beta": 0.0}},
        calls=_FIRST,
    ),
    Case("inkling", scales.Inkling(0.3, 4), neutral={"log_scaling_alpha": 0.0}, calls=_FIRST),
    Case("inkling-local", scales.Inverse(), "inkling", calls=(1, None)),
    Case("beam", scales.Beam(), neutral={"compute_attention_scaling": None}, calls=_FIRST),
)


@dataclass(frozen=True)
class Seen:
    """One call: what capture recorded, q and k before any scale, and the result [batch, heads, queries, d_v]."""

    call: AttentionCall
    query: Tensor
    key: Tensor
    result: Tensor


def made(case: Case, **config: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model of a case in eval mode with its own eager attention, and inputs; logits are moved away from zero."""
    name, fields = case.architecture or case.name, case.config | config
    if name in ARCHITECTURES:
        return build(name, attn="eager", gain=3.0, **fields)
    transformers = pytest.importorskip("transformers")
    model_class, config_class, tiny = _OTHERS[name]
    torch.manual_seed(7)
    settings = getattr(transformers, config_class)(**tiny | fields)
    model = getattr(transformers, model_class)._from_config(settings, attn_implementation="eager")
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3.0 if weight.ndim >= 2 else 1.0)
    ids = torch.randint(3, VOCABULARY, (3, TOKENS), generator=torch.Generator().manual_seed(3))
    return model.eval(), {"input_ids": ids}


def run(case: Case, monkeypatch: pytest.MonkeyPatch) -> list[Seen]:
    """The calls of a case that follow its rule."""
    calls, results = _run(*made(case))
    before = calls
    if case.neutral:
        neutral = dict(case.neutral)
        if neutral.pop("compute_attention_scaling", ...) is None:  # written into the code
            ones = lambda positions: torch.ones(1, 1, positions.shape[-1], 1)  # noqa: E731
            monkeypatch.setattr("transformers.models.beam.modeling_beam.compute_attention_scaling", ones)
        before, _ = _run(*made(case, **neutral))
    assert len(calls) == len(results) == len(before)
    seen = [
        Seen(call, raw.query / (raw.query_factor or 1.0), raw.key / (raw.key_factor or 1.0), result)
        for call, raw, result in zip(calls, before, results, strict=True)
    ]
    return seen[slice(*case.calls)]


def _run(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[list[AttentionCall], list[Tensor]]:
    calls: list[AttentionCall] = []
    with torch.no_grad(), capture(model, calls.append, follow_projections=True), logged_results() as results:
        model(**inputs)
    return calls, results


@dataclass(frozen=True)
class Weighed:
    """Attention of a model that bypasses every seam: q and k of its projections, what is added, and its weights."""

    query: Tensor
    key: Tensor
    bias: Tensor | float
    weights: Tensor


def _projected(name: str, module: str, *parts: str, **config: Any) -> tuple[nn.Module, Any, Any, Any]:
    """The model, its inputs, where the outputs of projections will stand, by head, and the attention module."""
    model, inputs = build(name, attn="eager", padding="none", gain=3.0, **config)
    attention, outputs = model.get_submodule(module), {}

    def keep(part: str) -> Callable[..., None]:
        return lambda _module, _inputs, output: outputs.setdefault(part, output.detach())

    for part in parts:
        attention.get_submodule(part).register_forward_hook(keep(part))
    return model, inputs, outputs, attention


def _heads(output: Tensor, heads: int) -> Tensor:
    return output.unflatten(-1, (heads, -1)).transpose(1, 2)


def _split(name: str, module: str, parts: tuple[str, str], **config: Any) -> Weighed:
    model, inputs, outputs, _ = _projected(name, module, *parts, **config)
    weights = model(**inputs, output_attentions=True).attentions[0]
    query, key = (_heads(outputs[part], weights.shape[1]) for part in parts)
    return Weighed(query, key, 0.0, weights)


def _alibi(name: str, fused: str, scaled: bool, **config: Any) -> Weighed:
    import importlib

    model, inputs, outputs, _ = _projected(name, "transformer.h.0.self_attention", fused, **config)
    weights = model(**inputs, output_attentions=True).attentions[0]
    batch, heads, tokens, _ = weights.shape
    if name == "bloom":  # [heads, 3, d]
        query, key, _ = outputs[fused].unflatten(-1, (heads, 3, -1)).permute(3, 0, 2, 1, 4)
    else:  # [heads of q, one of k, one of v; d]
        query, key, _ = outputs[fused].unflatten(-1, (heads + 2, -1)).transpose(1, 2).split((heads, 1, 1), 1)
    build_alibi = importlib.import_module(type(model).__module__).build_alibi_tensor
    alibi = build_alibi(torch.ones(batch, tokens), heads, torch.float32).view(batch, heads, 1, tokens)
    if scaled:  # twice: transformers 5.24 puts it into the mask for SDPA and adds it to the products in eager code as well
        alibi = 2 * alibi * query.shape[-1] ** -0.5
    return Weighed(query, key, alibi, weights)


def _deberta(kinds: list[str]) -> Weighed:
    parts = ("query_proj", "key_proj")
    model, inputs, outputs, attention = _projected("deberta_v2", "encoder.layer.0.attention.self", *parts, pos_att_type=kinds)
    original, terms = attention.disentangled_attention_bias, []

    def keep(*arguments: Any) -> Tensor:
        terms.append(original(*arguments))
        return terms[-1]

    attention.disentangled_attention_bias = keep
    weights = model(**inputs, output_attentions=True).attentions[0]
    query, key = (_heads(outputs[part], weights.shape[1]) for part in parts)
    assert terms[0].std() > 0
    return Weighed(query, key, terms[0].view(weights.shape), weights)


SWIN_TEMPERATURES = (2.7, 5.3)  # of two heads, in logarithms; the second is beyond the clamp


def _swin() -> Weighed:
    module, parts = "encoder.layers.0.blocks.0.attention.self", ("query", "key")
    model, inputs, outputs, attention = _projected("swinv2", module, *parts)
    with torch.no_grad():
        attention.logit_scale.copy_(torch.tensor(SWIN_TEMPERATURES).view(2, 1, 1))
        attention.continuous_position_bias_mlp[-1].weight.zero_()  # one bias for all pairs, which a softmax ignores
    weights = []
    attention.dropout.register_forward_hook(lambda _module, _inputs, output: weights.append(output))
    model(**inputs)
    query, key = (nn.functional.normalize(_heads(outputs[part], 2), dim=-1) for part in parts)
    return Weighed(query, key, 0.0, weights[0])


def _cosine() -> scales.Cosine:
    rule = scales.Cosine(2)
    rule.logit_scale.data.copy_(torch.tensor(SWIN_TEMPERATURES))
    return rule


# Models that bypass every seam: the rule, and how to get at their weights.
BYPASSING: dict[str, tuple[Scale, Callable[[], Weighed]]] = {
    "gpt_neo": (scales.Constant(), lambda: _split("gpt_neo", "transformer.h.0.attn.attention", ("q_proj", "k_proj"))),
    "xglm": (scales.InverseSqrt(), lambda: _split("xglm", "model.layers.0.self_attn", ("q_proj", "k_proj"))),
    "bloom-alibi": (scales.InverseSqrt(), lambda: _alibi("bloom", "query_key_value", scaled=False)),
    "falcon-alibi": (scales.InverseSqrt(), lambda: _alibi("falcon_eager", "query_key_value", scaled=True, alibi=True)),
    "deberta_v2": (scales.InverseSqrtTerms(3), lambda: _deberta(["c2p", "p2c"])),
    "deberta_v2-c2p": (scales.InverseSqrtTerms(2), lambda: _deberta(["c2p"])),
    "swinv2": (_cosine(), _swin),
}
