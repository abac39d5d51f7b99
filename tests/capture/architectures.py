"""Tiny, randomly initialised Hugging Face models with padded inputs: the sweep that every test of real architectures uses.

    model, inputs = build("llama")                      # eval mode, float32, seeded; row 1 of the batch is padded on the right
    model, inputs = build("llama", padding="left")      # or "none"
    model, inputs = build("gemma2", attn="eager", gain=8.0)   # gain multiplies every weight matrix: logits far from zero
    with torch.no_grad(): model(**inputs)

`ARCHITECTURES[name]` says what kind it is, how many attention calls one forward pass makes (`calls`), and which
implementations it takes (`attn`). Weights keep the initialisation of their authors (so that scale rules hold as they meant them);
sizes avoid coincidences: the width of a head is not the model's width divided by the number of heads wherever the config lets us
choose.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

VOCABULARY, TOKENS, BATCH = 61, 11, 3
PADDED_ROW, PADDING = 1, 4
HIDDEN, HEADS, KV_HEADS, LAYERS, WIDE = 24, 4, 2, 2, 37
HEAD_DIM = 10  # where a config takes it; HIDDEN / HEADS is 6

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": WIDE,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GQA = _TEXT | {"num_key_value_heads": KV_HEADS}
_OWN_WIDTH = _GQA | {"head_dim": HEAD_DIM}
_EIGHT = {"hidden_size": 32}  # head width 8: a partial rotary factor needs an even rotated part
_LOCAL_GLOBAL = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
_SCALAR = {"query_pre_attn_scalar": 17}
_SOFTCAP = _SCALAR | {"sliding_window": 3, "attn_logit_softcapping": 5.0}
_EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 40}  # grouped products want rows of 16 bytes
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": HIDDEN,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_inner": WIDE,
    "n_positions": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MLA = _TEXT | {
    "num_key_value_heads": HEADS,
    "kv_lora_rank": 14,
    "q_lora_rank": 14,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 40,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 16,
}
_ZAMBA2 = _GQA | {
    "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "mamba", "hybrid", "hybrid"],
    "hybrid_layer_ids": [2, 3],
    "num_key_value_heads": HEADS,
    "n_mamba_heads": 4,
    "mamba_d_state": 4,
    "mamba_expand": 2,
    "mamba_ngroups": 1,
    "chunk_size": 4,
    "num_mem_blocks": 1,
    "adapter_rank": 4,
    "use_mem_rope": False,
}
_GEMMA3N = _OWN_WIDTH | {
    "num_hidden_layers": 3,
    "num_kv_shared_layers": 1,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 7,
    "altup_num_inputs": 2,
    "laurel_rank": 5,
    "intermediate_size": [WIDE] * 3,
    "activation_sparsity_pattern": [0.0] * 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 3,
}
_GEMMA4 = _OWN_WIDTH | _LOCAL_GLOBAL | {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 7}
_LLAMA4 = _OWN_WIDTH | {
    "intermediate_size": 40,
    "intermediate_size_mlp": WIDE,
    "num_local_experts": 2,
    "interleave_moe_layer_step": 2,
    "no_rope_layers": [1, 0],
    "attention_chunk_size": 4,
    "floor_scale": 4,
    "attn_scale": 0.3,
}
_QWEN3_NEXT = _OWN_WIDTH | {
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 40,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 5,
}
_GPT_NEO = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "attention_types": [[["global", "local"], 1]],
    "max_position_embeddings": 32,
    "window_size": 3,
}
_XGLM = {"vocab_size": VOCABULARY, "d_model": HIDDEN, "num_layers": LAYERS, "attention_heads": HEADS, "ffn_dim": WIDE}
_DISTILBERT = {
    "vocab_size": VOCABULARY,
    "dim": HIDDEN,
    "n_layers": LAYERS,
    "n_heads": HEADS,
    "hidden_dim": WIDE,
    "max_position_embeddings": 32,
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": HIDDEN,
    "d_kv": HEAD_DIM,
    "d_ff": WIDE,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "decoder_start_token_id": 0,
}
_T5GEMMA = dict.fromkeys(("encoder", "decoder"), _OWN_WIDTH | _SOFTCAP) | {"vocab_size": VOCABULARY}
_BART = {
    "vocab_size": VOCABULARY,
    "d_model": HIDDEN,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": WIDE,
    "decoder_ffn_dim": WIDE,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_IMAGE = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": WIDE,
    "image_size": 20,
    "patch_size": 5,
}
_SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 12, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4}
_WAV2VEC2 = _TEXT | {
    "conv_dim": (7, 7),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "do_stable_layer_norm": True,
    "feat_extract_norm": "layer",
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
}


@dataclass(frozen=True)
class Architecture:
    """One architecture of the sweep.

    Attributes:
        name: key in `ARCHITECTURES`.
        kind: "decoder", "encoder", "encoder-decoder", "vision", "audio", "two-tower" or "speech"; it decides the inputs.
        model_class, config_class: names in `transformers`; config: arguments of the config.
        calls: attention calls of one forward pass.
        attn: implementations that the model takes, the default first.
        dropouts: fields of the config that turn its dropout on.
        own: its code computes attention in plain products.
    """

    name: str
    kind: str
    model_class: str
    config_class: str
    config: dict[str, Any]
    calls: int = 2
    attn: tuple[str, ...] = ("sdpa", "eager")
    dropouts: tuple[str, ...] = ("attention_dropout",)
    own: bool = False


def _decoder(name: str, prefix: str, config: dict[str, Any], **fields: Any) -> Architecture:
    return Architecture(name, "decoder", f"{prefix}ForCausalLM", f"{prefix}Config", config, **fields)


def _encoder(name: str, prefix: str, config: dict[str, Any], kind: str = "encoder", **fields: Any) -> Architecture:
    fields.setdefault("dropouts", ("attention_probs_dropout_prob", "hidden_dropout_prob"))
    return Architecture(name, kind, f"{prefix}Model", f"{prefix}Config", config, **fields)


def _both(name: str, prefix: str, config: dict[str, Any], kind: str = "encoder-decoder", **fields: Any) -> Architecture:
    """Encoder, decoder and cross attention in each of two layers."""
    return Architecture(name, kind, f"{prefix}ForConditionalGeneration", f"{prefix}Config", config, calls=6, **fields)


_EAGER = ("eager",)
_ATTN_PDROP = ("attn_pdrop", "resid_pdrop")
_ATTENTION_AND_DROPOUT = ("attention_dropout", "dropout")

_ROWS = (
    # decoders; 1/sqrt(d) unless a note says otherwise
    _decoder("llama", "Llama", _OWN_WIDTH),
    _decoder("mistral", "Mistral", _OWN_WIDTH | {"sliding_window": 3}),
    _decoder("mixtral", "Mixtral", _OWN_WIDTH | _EXPERTS),
    _decoder("ministral3", "Ministral3", _OWN_WIDTH),
    _decoder("qwen2", "Qwen2", _GQA),
    _decoder("qwen3", "Qwen3", _OWN_WIDTH),  # QK-norm, a head at a time
    _decoder("qwen3_next", "Qwen3Next", _QWEN3_NEXT, calls=1),  # q fused with its gate; one layer is linear attention
    _decoder("phi", "Phi", _GQA | _EIGHT | {"partial_rotary_factor": 0.5}),
    _decoder("phi3", "Phi3", _GQA),  # q, k, v in one projection
    _decoder("gemma", "Gemma", _OWN_WIDTH),
    _decoder("gemma2", "Gemma2", _OWN_WIDTH | _SOFTCAP, attn=_EAGER),  # 17^-1/2, softcap
    Architecture("gemma3", "decoder", "Gemma3ForCausalLM", "Gemma3TextConfig", _OWN_WIDTH | _SCALAR | _LOCAL_GLOBAL),
    Architecture("gemma3n", "decoder", "Gemma3nForCausalLM", "Gemma3nTextConfig", _GEMMA3N, calls=3),  # 1.0 behind QK-norm
    Architecture("gemma4", "decoder", "Gemma4ForCausalLM", "Gemma4TextConfig", _GEMMA4),  # 1.0 behind QK-norm
    _decoder("gpt_oss", "GptOss", _OWN_WIDTH | _EXPERTS | _LOCAL_GLOBAL, attn=_EAGER),  # sinks
    _decoder("granite", "Granite", _GQA | {"attention_multiplier": 0.0625}),
    _decoder("granite_swa", "GraniteSWA", _OWN_WIDTH | {"sliding_window": 3}, attn=_EAGER),  # multiplier 1.0, sinks
    _decoder("zamba2", "Zamba2", _ZAMBA2),  # (d/2)^-1/2
    Architecture("llama4", "decoder", "Llama4ForCausalLM", "Llama4TextConfig", _LLAMA4),  # q grows with position in layer 1
    _decoder("glm4", "Glm4", _OWN_WIDTH),
    _decoder("nemotron", "Nemotron", _OWN_WIDTH),
    _decoder("exaone4", "Exaone4", _OWN_WIDTH | _LOCAL_GLOBAL),
    _decoder("persimmon", "Persimmon", _TEXT | _EIGHT),  # q, k, v fused a head at a time
    _decoder("opt", "OPT", _TEXT | {"ffn_dim": WIDE, "word_embed_proj_dim": HIDDEN}, dropouts=_ATTENTION_AND_DROPOUT),  # q first
    Architecture("gpt2", "decoder", "GPT2LMHeadModel", "GPT2Config", _GPT2, dropouts=_ATTN_PDROP),
    _decoder("gptj", "GPTJ", _GPT2 | {"rotary_dim": 4}, dropouts=_ATTN_PDROP),
    _decoder("gpt_bigcode", "GPTBigCode", _GPT2 | {"multi_query": True}, dropouts=_ATTN_PDROP),
    _decoder("gpt_neox", "GPTNeoX", _TEXT | _EIGHT),
    _decoder("olmo2", "Olmo2", _GQA),  # QK-norm over all heads at once
    _decoder("cohere", "Cohere", _GQA | {"use_qk_norm": True}),
    _decoder("stablelm", "StableLm", _GQA | _EIGHT | {"partial_rotary_factor": 0.5}),
    _decoder("starcoder2", "Starcoder2", _GQA),
    _decoder("smollm3", "SmolLM3", _GQA),
    _decoder("deepseek_v2", "DeepseekV2", _MLA | {"topk_method": "greedy"}),
    _decoder("deepseek_v3", "DeepseekV3", _MLA | {"rope_parameters": _YARN}),  # the scale carries mscale squared
    _decoder("falcon", "Falcon", _TEXT, attn=("sdpa",)),  # calls F.scaled_dot_product_attention itself
    # these write their attention out themselves, without transformers' interface
    _decoder("falcon_eager", "Falcon", _TEXT, attn=_EAGER, own=True),
    _decoder(
        "bloom",
        "Bloom",
        {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "n_layer": LAYERS, "n_head": HEADS},
        attn=_EAGER,
        own=True,
    ),
    _decoder(
        "mpt", "Mpt", {"vocab_size": VOCABULARY, "d_model": HIDDEN, "n_layers": LAYERS, "n_heads": HEADS}, attn=_EAGER, own=True
    ),
    _decoder("gpt_neo", "GPTNeo", _GPT_NEO, attn=_EAGER, own=True),
    _decoder("xglm", "XGLM", _XGLM, attn=_EAGER, own=True),
    # encoders
    _encoder("bert", "Bert", _TEXT),
    _encoder("roberta", "Roberta", _TEXT),
    _encoder("distilbert", "DistilBert", _DISTILBERT, dropouts=_ATTENTION_AND_DROPOUT),
    _encoder("albert", "Albert", _TEXT | {"embedding_size": 13, "num_hidden_layers": 3}, calls=3),  # one module, three calls
    _encoder("electra", "Electra", _TEXT | {"embedding_size": 13}),
    _encoder("esm", "Esm", _TEXT | {"position_embedding_type": "rotary", "mask_token_id": 3, "token_dropout": False}),  # q first
    _encoder(
        "modernbert",
        "ModernBert",
        _TEXT | {"local_attention": 4, "global_attn_every_n_layers": 2},
        dropouts=("attention_dropout",),
    ),
    _encoder(
        "openai_privacy_filter",
        "OpenAIPrivacyFilter",
        _OWN_WIDTH | _EXPERTS | {"sliding_window": 3},
        attn=_EAGER,
        dropouts=("attention_dropout",),
    ),  # d^-1/4 on q and on k, sinks
    _encoder(
        "deberta_v2", "DebertaV2", _TEXT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, attn=_EAGER, own=True
    ),
    # encoder, decoder and cross attention
    _both("t5", "T5", _T5, dropouts=("dropout_rate",)),  # no scale
    _both("mt5", "MT5", _T5, dropouts=("dropout_rate",)),
    _both("t5gemma", "T5Gemma", _T5GEMMA, attn=_EAGER),
    _both("bart", "Bart", _BART, dropouts=_ATTENTION_AND_DROPOUT),
    _both("pegasus", "Pegasus", _BART, dropouts=_ATTENTION_AND_DROPOUT),
    _both(
        "whisper",
        "Whisper",
        _BART | {"num_mel_bins": 7, "max_source_positions": 13, "max_target_positions": 32},
        kind="speech",
        dropouts=_ATTENTION_AND_DROPOUT,
    ),  # q first
    # vision, audio, two towers
    _encoder("vit", "ViT", _IMAGE, kind="vision"),
    _encoder("deit", "DeiT", _IMAGE, kind="vision"),
    _encoder("dinov2", "Dinov2", _IMAGE, kind="vision"),
    _encoder("beit", "Beit", _IMAGE | {"use_relative_position_bias": True}, kind="vision"),
    _encoder("swin", "Swin", _SWIN, kind="vision", calls=3),
    _encoder("swinv2", "Swinv2", _SWIN, kind="vision", calls=3, attn=_EAGER, own=True),  # learned cosine, in its own code
    _encoder(
        "siglip", "SiglipVision", _IMAGE, kind="vision", calls=3, dropouts=("attention_dropout",)
    ),  # pools by nn.MultiheadAttention
    _encoder(
        "clip",
        "CLIP",
        {"text_config": _TEXT, "vision_config": _IMAGE, "projection_dim": 11},
        kind="two-tower",
        calls=4,
        dropouts=(),
    ),
    _encoder("wav2vec2", "Wav2Vec2", _WAV2VEC2, kind="audio", dropouts=("attention_dropout", "hidden_dropout")),
)

ARCHITECTURES: dict[str, Architecture] = {row.name: row for row in _ROWS}
WRITTEN_OUT = tuple(row.name for row in _ROWS if row.own)


def build(
    name: str,
    *,
    attn: str | None = None,
    padding: str = "right",
    gain: float = 1.0,
    dropout: float = 0.0,
    seed: int = 7,
    **config: Any,
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model of the sweep in eval mode and the inputs of one forward pass.

    Args:
        attn: implementation; None for the first that the architecture takes.
        padding: "right", "left" or "none"; row 1 of the batch has 4 of its 11 tokens padded.
        gain: factor on every weight of two and more dimensions, to move logits away from zero.
        dropout: probability for every dropout field (the model still is in eval mode).
        config: further fields of the config.
    """
    return build_row(ARCHITECTURES[name], attn=attn, padding=padding, gain=gain, dropout=dropout, seed=seed, **config)


def build_row(
    row: Architecture, *, attn: str | None, padding: str, gain: float, dropout: float, seed: int, **config: Any
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """As `build`, for a row that need not be in the table."""
    transformers = pytest.importorskip("transformers")
    fields = {**row.config, **dict.fromkeys(row.dropouts, dropout), **config}
    if row.kind == "two-tower":
        fields |= {side: row.config[side] | {"attention_dropout": dropout} for side in ("text_config", "vision_config")}
    settings = getattr(transformers, row.config_class)(**fields)
    torch.manual_seed(seed)
    model = getattr(transformers, row.model_class)._from_config(settings, attn_implementation=attn or row.attn[0])
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if weight_name.endswith(("sinks", "relative_position_bias_table")):  # zero or unset by their authors
                weight.normal_()
            elif gain != 1.0 and weight.ndim >= 2:
                weight.mul_(gain)
    return model.eval(), _INPUTS[row.kind](settings, padding)


def _tokens(settings: Any, padding: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    if padding == "none":
        return {"input_ids": ids}
    padded = slice(TOKENS - PADDING, None) if padding == "right" else slice(None, PADDING)
    mask[PADDED_ROW, padded] = 0
    return {"input_ids": ids.where(mask.bool(), torch.zeros_like(ids)), "attention_mask": mask}


def _source_and_target(settings: Any, padding: str) -> dict[str, torch.Tensor]:
    target = torch.randint(3, VOCABULARY, (BATCH, 7), generator=torch.Generator().manual_seed(5))
    return _tokens(settings, padding) | {"decoder_input_ids": target}


def _pixels(settings: Any, padding: str) -> dict[str, torch.Tensor]:
    side = settings.image_size
    return {"pixel_values": torch.randn(BATCH, 3, side, side, generator=torch.Generator().manual_seed(3))}


def _speech(settings: Any, padding: str) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    features = torch.randn(BATCH, settings.num_mel_bins, 2 * settings.max_source_positions, generator=draw)
    return {"input_features": features, "decoder_input_ids": torch.randint(3, VOCABULARY, (BATCH, 7), generator=draw)}


def _wave(settings: Any, padding: str) -> dict[str, torch.Tensor]:
    wave = torch.randn(BATCH, 260, generator=torch.Generator().manual_seed(3))
    mask = torch.ones(BATCH, 260, dtype=torch.long)
    if padding != "none":
        mask[PADDED_ROW, 170:] = 0
    return {"input_values": wave, "attention_mask": mask}


def _two_towers(settings: Any, padding: str) -> dict[str, torch.Tensor]:
    return _tokens(settings, padding) | _pixels(settings.vision_config, padding)


_INPUTS: dict[str, Callable[[Any, str], dict[str, torch.Tensor]]] = {
    "decoder": _tokens,
    "encoder": _tokens,
    "encoder-decoder": _source_and_target,
    "vision": _pixels,
    "speech": _speech,
    "audio": _wave,
    "two-tower": _two_towers,
}
