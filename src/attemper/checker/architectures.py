"""The table of architectures: which scale rule each one's config calls for, and where that can be read.

What must hold: every row names the file in which it was seen; a name appears in one row only; the rows are what a reader looks
up, so the arithmetic stands in `scale_rules`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from attemper.checker import scale_rules as rules
from attemper.checker.scale_rules import Design, Site


@dataclass(frozen=True)
class Architecture:
    """One row of the table.

    Attributes:
        rule: the rule in words.
        design: the rule as arithmetic.
        names: separated by blanks: model_types of transformers configs, packages under transformers.models, attention classes.
        source: where the rule can be read; {name} stands for the name that was looked up.
    """

    rule: str
    design: Callable[[Site], Design]
    names: str
    source: str


def architecture(name: str) -> Architecture | None:
    """The row for a model_type, a package under transformers.models, or the name of an attention class; None if there is none."""
    return _BY_NAME.get(name)


_ONE_FILE = "transformers {name}/modeling"
_VASWANI = "Vaswani et al. 2017, section 3.2.1"

# Every attention class in these packages' modeling files scales by 1/sqrt(d_head) at the call or by code of its own;
# tests/checker/test_architectures.py reads the installed files again.
_INVERSE_SQRT = """
    afmoe albert align altclip apertus apertus1p5 arcee aria audio_spectrogram_transformer autoformer bamba bark bart
    beit bert bert_generation biogpt bitnet blenderbot blenderbot_small blip blip_2 bloom blt bridgetower camembert
    canary canine chameleon chinese_clip clap clip clipseg codegen cohere cohere2 cohere2_moe cohere_asr
    cohere_compass conditional_detr convbert cosmos3_edge csm ctrl cwm dbrx deepseek_v4 deit detr diffllama dinov2
    dinov2_with_registers dinov3_vit distilbert doge donut dots1 dots3_note dpt edgetam edgetam_video efficientloftr
    electra emu3 eomt eomt_dinov3 ernie ernie4_5 ernie4_5_moe ernie4_5_vl_moe esmc eurobert exaone4 exaone4_5
    exaone_moe falcon falcon_h1 flava flex_olmo flint fun_asr_nano gemma git glm glm4 glm4_moe glm4v glm4v_moe
    glm5_next glm_image glm_ocr glmasr glpn got_ocr2 gpt_neox gpt_oss gptj gradium_phonon_tts granite_speech
    granite_speech5 granite_speech_plus gte helium hiera higgs_audio_v2 hrm_text hubert hunyuan_v1_dense
    hunyuan_v1_moe hunyuan_vl hy_v3 idefics idefics2 idefics3 ijepa instructblip instructblipvideo internvl jais2
    jamba janus jetmoe jina_embeddings_v3 kimi_k25 kimi_linear kolibri1 kosmos2 kyutai_speech_to_text laguna lara_mini
    lasr layoutlm layoutlmv3 levit lfm2 lfm2_moe lfm3 lfm3_vl lightglue llama luke lxmert m2m_100 marian markuplm
    maskformer mbart megatron_bert mellum metaclip_2 mgp_str mimi mimo_v2_flash minicpm_ocr minicpmv4_6 minicpmv4_7
    minimax minimax_m2 minimax_m3_vl ministral mistral mixtral mlcd mllama mobilebert mobilevit modernbert_decoder
    molmo2 moshi mpnet muse_glimmer_assistant musicgen musicgen_melody nanochat nemotron nemotron3_5_transcribe
    nemotron3_diarization nemotron_asr_streaming nemotron_h neucodec nllb_moe nomic_bert olmo olmo2 olmo3 olmo_hybrid
    olmoe omniasr ovis2 owlv2 owlvit paddleocr_vl parakeet patchtst pe_audio pe_audio_video pe_video pegasus pegasus_x
    persimmon phi phi3 phi4_multimodal phimoe pixio pixtral plbart pocket_tts pocket_tts_audio_tokenizer pp_formulanet
    pp_ocrv5_mobile_rec pp_ocrv5_server_rec pp_ocrv6_small_rec pvt pvt_v2 qianfan_ocr qwen2 qwen2_5_vl qwen2_moe
    qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_asr qwen3_moe qwen3_next qwen3_omni_moe qwen3_vl qwen3_vl_moe qwen4_exp
    radio recurrent_gemma rembert roberta roberta_prelayernorm roc_bert roformer sam2 sam2_video sam3 sam3_lite_text
    sam3_tracker sam3_tracker_video sapiens2 seamless_m4t seamless_m4t_v2 seed_oss segformer seggpt sew siglip siglip2
    smollm3 smolvlm solar_open speech_to_text speecht5 splinter squeezebert stablelm starcoder2 superglue swin
    table_transformer tapas time_series_transformer timesformer tipsv2 tvp ultrabert unispeech unispeech_sat
    video_llama_3 videomae videomt visual_bert vit vit_mae vit_msn vitdet vitpose_backbone vivit vjepa2
    voxtral_realtime wav2vec2 wav2vec2_bert wav2vec2_conformer x_clip xcodec2 xlm_roberta xlm_roberta_xl xmod yolos
    zaya zoedepth clip_text_model clip_vision_model siglip_text_model siglip_vision_model llama4_vision_model
    data2vec-text data2vec-vision data2vec-audio sam sam_hq modernbert xlm-roberta blip_2_qformer gpt_neox_japanese
    aimv2 cpmant ibert openai xlnet
"""

ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture(
        "1/sqrt(d_head)",
        rules.inverse_sqrt,
        _INVERSE_SQRT,
        f"{_ONE_FILE}; {_VASWANI}",
    ),
    Architecture(
        "1/sqrt(d_head) multiplied into q, 1.0 at the call",
        rules.prescaled,
        "whisper opt esm EvollaSaProtSelfAttention qwen2_audio_encoder voxtral_encoder audioflamingo3_encoder "
        "moss_transcribe_diarize_audio kosmos_2_5_text_model xglm led longformer groupvit_text_model "
        "groupvit_vision_model clvp clvp_encoder clvp_decoder flaubert xlm trocr mvp fsmt dab-detr oneformer mask2former "
        "vits prophetnet layoutlmv2 dinat funnel EvollaSequenceCompressorAttention",
        f"{_ONE_FILE}: q_proj(x) * scaling; {_VASWANI}",
    ),
    Architecture(
        "d_head^(-1/4) on q and on k",
        rules.both_prescaled,
        "openai_privacy_filter nystromformer",
        f"{_ONE_FILE}; {_VASWANI}",
    ),
    Architecture(
        "1.0: 1/sqrt(d_head) is folded into the initial query weights",
        rules.folded,
        "t5 mt5 umt5 longt5 switch_transformers udop pop2piano pix2struct pix2struct_text_model pix2struct_vision_model",
        f"{_ONE_FILE}: scaling = 1.0; Raffel et al. 2020 (the released code initialises W_q with (d_model·d_kv)^(-1/2))",
    ),
    Architecture(
        "1.0",
        rules.one,
        "gpt_neo",
        f"{_ONE_FILE}: a float32 product with no scale",
    ),
    Architecture(
        "1.0",
        rules.one,
        "dia dia_encoder dia_decoder",
        "transformers dia/modeling: scaling = 1",
    ),
    Architecture(
        "1.0 behind norms on q and k",
        rules.one,
        "gemma3n gemma3n_text gemma4 gemma4_text gemma4_vision gemma4_unified gemma4_unified_text embedding_gemma2 "
        "embedding_gemma2_text diffusion_gemma diffusion_gemma_text",
        f"{_ONE_FILE}: scaling = 1.0 behind q_norm and k_norm",
    ),
    Architecture(
        "1/d_head behind norms on q and k, growing with position in global layers",
        rules.inverse_with_log_positions,
        "inkling_text InklingAttention",
        "transformers inkling/modeling: scaling = 1.0 / head_dim",
    ),
    Architecture(
        "query_pre_attn_scalar^(-1/2)",
        rules.query_pre_attn_scalar,
        "gemma2 gemma3 gemma3_text t5gemma t5_gemma_module vaultgemma step3p5 Step3p7Attention t5gemma2 t5gemma2_text "
        "t5gemma2_encoder t5gemma2_decoder",
        f"{_ONE_FILE}: scaling = config.query_pre_attn_scalar**-0.5",
    ),
    Architecture(
        "attention_multiplier",
        rules.attention_multiplier,
        "granite granitemoe granitemoeshared granitemoehybrid granite_swa granitemoe_swa hyperclovax granite4_vision_text "
        "granite_docling_text",
        f"{_ONE_FILE}: scaling = config.attention_multiplier",
    ),
    Architecture(
        "(d_head/2)^(-1/2)",
        rules.half_width,
        "zamba zamba2",
        f"{_ONE_FILE}: scaling = (head_dim / 2) ** -0.5",
    ),
    Architecture(
        "1/sqrt(d_head) if scale_attn_weights, times 1/(layer+1) if scale_attn_by_inverse_layer_idx",
        rules.gpt2,
        "gpt2 decision_transformer imagegpt gpt_bigcode",
        f"{_ONE_FILE}: scale_attn_weights, scale_attn_by_inverse_layer_idx",
    ),
    Architecture(
        "1/sqrt(d_nope + d_rope), times mscale^2 where RoPE is stretched",
        rules.multi_latent,
        "deepseek_v2 deepseek_v3 deepseek_v32 axk1 axk2 minicpm3 youtu glm4_moe_lite glm_moe_dsa hy_v4 hy_v4_vl_text "
        "bailing_hybrid",
        f"{_ONE_FILE}: yarn_apply_mscale; DeepSeek-AI 2405.04434",
    ),
    Architecture(
        "1/sqrt(d_nope + d_rope), times mscale^2 where RoPE is stretched, growing with position",
        rules.multi_latent_by_position,
        "mistral4",
        f"{_ONE_FILE}: yarn_apply_mscale, and a factor of the position on q",
    ),
    Architecture(
        "1/sqrt(d_nope + d_rope), times mscale^2 where RoPE is stretched, times sqrt(hidden_size/q_lora_rank) on q",
        rules.multi_latent_scaled_latents,
        "longcat_flash",
        f"{_ONE_FILE}: yarn_apply_mscale, mla_scale_q_lora",
    ),
    Architecture(
        "1/sqrt(d_head), growing with position in layers without RoPE",
        rules.by_position,
        "llama4 llama4_text ministral3 beam inkling2_text inkling2_loop_text",
        f"{_ONE_FILE}: attention temperature by position on q",
    ),
    Architecture(
        "1/sqrt(d_head · (1 + position terms))",
        rules.deberta,
        "deberta deberta-v2 sew-d",
        "transformers deberta_v2/modeling: scaled_size_sqrt; He et al. 2006.03654, equation 4",
    ),
    Architecture(
        "attn_config.softmax_scale, or 1/sqrt(d_head)",
        rules.mpt,
        "mpt",
        f"{_ONE_FILE}: softmax_scale",
    ),
    Architecture(
        "1/sqrt(d_head) of the width before padding",
        rules.padded,
        "moonshine moonshine_streaming",
        f"{_ONE_FILE}: pad_head_dim_to_multiple_of",
    ),
    Architecture(
        "1/sqrt(d_model)",
        rules.model_width,
        "cvt CvtSelfAttention",
        "transformers cvt/modeling: scale = embed_dim**-0.5",
    ),
    Architecture(
        "1/sqrt(number of heads) multiplied into q",
        rules.inverse_sqrt_heads,
        "EvollaSequenceAlignerCrossAttention",
        "transformers evolla/modeling: scale = num_attention_heads**-0.5",
    ),
    Architecture(
        "sqrt(d_head) on unit q and k",
        rules.sqrt_behind_norm,
        "ngpt",
        "Loshchilov et al. 2410.01131, section 2.3.2",
    ),
    Architecture(
        "1/sqrt(d_head) · qk_scale_factor behind norms on q and k",
        rules.qk_scale_factor,
        "muse_spark_text muse_glimmer_text",
        f"{_ONE_FILE}: qk_norm(q) * qk_scale_factor",
    ),
    Architecture(
        "learned",
        rules.learned,
        "swinv2 swin2sr timesfm timesfm2_5 dory VideoPrismMultiheadAttentionPoolingHead Gemma3nAudioAttention "
        "Gemma4AudioAttention mistral_large4_text",
        f"{_ONE_FILE}: a trained parameter scales q·k",
    ),
)

_BY_NAME = {name: row for row in ARCHITECTURES for name in row.names.split()}
