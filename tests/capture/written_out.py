"""Tiny Hugging Face models whose own code computes attention in plain products, beyond those of the sweep in `architectures`.

    model, inputs = build("xlnet", padding="left")      # as there

What each puts between its product and its softmax is noted beside it.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tests.capture.architectures import (
    _ATTENTION_AND_DROPOUT,
    _ATTN_PDROP,
    _BART,
    _GPT2,
    _INPUTS,
    _SWIN,
    _TEXT,
    _WAV2VEC2,
    BATCH,
    HEADS,
    HIDDEN,
    LAYERS,
    VOCABULARY,
    WIDE,
    Architecture,
    _both,
    _encoder,
    build_row,
)

_PROPHETNET = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "encoder_ffn_dim": WIDE,
    "num_encoder_layers": LAYERS,
    "num_encoder_attention_heads": HEADS,
    "decoder_ffn_dim": WIDE,
    "num_decoder_layers": LAYERS,
    "num_decoder_attention_heads": HEADS,
    "max_position_embeddings": 32,
}
_XLM = {"vocab_size": VOCABULARY, "emb_dim": HIDDEN, "n_layers": LAYERS, "n_heads": HEADS, "n_langs": 1}
_FUNNEL = {
    "vocab_size": VOCABULARY,
    "block_sizes": [1, 1],
    "num_decoder_layers": 1,
    "d_model": HIDDEN,
    "n_head": HEADS,
    "d_head": 5,
}
_SQUEEZED = {"q_groups": 2, "k_groups": 2, "v_groups": 2, "intermediate_groups": 1, "output_groups": 1, "intermediate_size": 36}
_PYRAMID = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16], "num_attention_heads": [1, 2, 2, 4]}
_WINDOWS = {"window_block_indices": [0], "window_size": 2, "use_relative_position_embeddings": True}
_FSMT = {name: value for name, value in _BART.items() if name != "vocab_size"}
_FSMT |= {"langs": ["a", "b"], "src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY}
_SWIN2SR = {"image_size": 16, "embed_dim": 12, "depths": [2], "num_heads": [2], "window_size": 4}
_VITDET = {"image_size": 32, "pretrain_image_size": 32, "patch_size": 8, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS}
_CANINE = {"num_hash_buckets": 40, "downsampling_rate": 2, "local_transformer_stride": 4, "upsampling_kernel_size": 2}
_PERCEIVER = {
    "num_latents": 5,
    "d_latents": 16,
    "d_model": 9,
    "num_blocks": 1,
    "num_self_attends_per_block": 2,
    "num_self_attention_heads": 2,
    "num_cross_attention_heads": 1,
}

_ROWS = (
    Architecture("openai-gpt", "decoder", "OpenAIGPTModel", "OpenAIGPTConfig", _GPT2, dropouts=_ATTN_PDROP),  # z·m − 10⁴(1 − m)
    _encoder("gpt_neox_japanese", "GPTNeoXJapanese", _TEXT | {"hidden_size": 32, "rotary_pct": 0.5}, dropouts=()),  # baddbmm
    _encoder("xlnet", "XLNet", {"vocab_size": VOCABULARY, "d_model": HIDDEN, "n_layer": LAYERS, "n_head": HEADS}, dropouts=()),
    _encoder("xlm", "XLM", _XLM, dropouts=()),  # q first, in-place fill
    _encoder("deberta", "Deberta", _TEXT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    _encoder("funnel", "Funnel", _FUNNEL, calls=3, dropouts=()),  # einsum, terms of position, pooled queries
    _encoder("roformer", "RoFormer", _TEXT | {"embedding_size": HIDDEN}),
    _encoder("mpnet", "MPNet", _TEXT),  # a bias by relative position
    _encoder("convbert", "ConvBert", _TEXT | {"embedding_size": HIDDEN}),  # half its heads are convolutions
    _encoder("big_bird", "BigBird", _TEXT | {"attention_type": "original_full"}),
    _encoder("canine", "Canine", _TEXT | _CANINE, calls=6),  # chunks, some of padding only
    _encoder("rembert", "RemBert", _TEXT | {"input_embedding_size": 13}),
    _encoder("megatron_bert", "MegatronBert", _TEXT),
    _encoder("ibert", "IBert", _TEXT),
    _encoder("luke", "Luke", _TEXT | {"entity_vocab_size": 11, "entity_emb_size": HIDDEN}),
    _encoder("tapas", "Tapas", _TEXT | {"type_vocab_sizes": [3, 8, 8, 2, 8, 8, 4]}),
    _encoder("squeezebert", "SqueezeBert", _TEXT | {"embedding_size": HIDDEN} | _SQUEEZED),  # products in modules of their own
    _encoder("sew_d", "SEWD", _WAV2VEC2 | {"squeeze_factor": 1}, kind="audio", dropouts=()),  # its own autograd function
    _both("fsmt", "FSMT", _FSMT, dropouts=_ATTENTION_AND_DROPOUT),
    _both("mvp", "Mvp", _BART, dropouts=_ATTENTION_AND_DROPOUT),
    replace(
        _both("prophetnet", "ProphetNet", _PROPHETNET, dropouts=("dropout",)), calls=8
    ),  # [batch, streams, heads, queries, keys]
    _encoder("donut", "DonutSwin", _SWIN, kind="vision", calls=3),  # windows
    _encoder("swin2sr", "Swin2SR", _SWIN2SR, kind="vision"),  # cosine
    _encoder("vitdet", "VitDet", _VITDET | {"num_attention_heads": HEADS} | _WINDOWS, kind="vision", dropouts=("dropout_prob",)),
    _encoder("pvt", "Pvt", _PYRAMID | {"image_size": 32}, kind="vision", calls=4, dropouts=("attention_probs_dropout_prob",)),
    _encoder("perceiver", "Perceiver", _PERCEIVER, kind="array", calls=3, dropouts=("attention_probs_dropout_prob",)),
)

_REFORMER = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "attention_head_size": 6,
    "feed_forward_size": WIDE,
    "attn_layers": ["local", "lsh"],
    "axial_pos_embds": False,
    "max_position_embeddings": 32,
    "local_attn_chunk_length": 4,
    "lsh_attn_chunk_length": 4,
    "num_buckets": 2,
    "num_hashes": 1,
    "is_decoder": False,
}

# Models of which something is not seen, and the words that must be said of it.
NOT_SEEN = {
    "longformer": (_encoder("longformer", "Longformer", _TEXT | {"attention_window": 4}, calls=0), "a softmax over logits ran"),
    "reformer": (_encoder("reformer", "Reformer", _REFORMER, calls=0, dropouts=()), "nor a softmax over logits was seen"),
    "big_bird": (
        _encoder("big_bird", "BigBird", _TEXT | {"block_size": 1, "num_random_blocks": 1}, calls=8),
        "its logits pass through cat",
    ),
}

ROWS: dict[str, Architecture] = {row.name: replace(row, attn=("eager",), own=True) for row in _ROWS}


def build(
    name: str, *, padding: str = "right", gain: float = 1.0, dropout: float = 0.0, seed: int = 7, **config: Any
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """As `architectures.build`, of these."""
    return build_row(ROWS[name], attn="eager", padding=padding, gain=gain, dropout=dropout, seed=seed, **config)


def _array(settings: Any, padding: str) -> dict[str, torch.Tensor]:
    return {"inputs": torch.randn(BATCH, 12, settings.d_model, generator=torch.Generator().manual_seed(3))}


_INPUTS["array"] = _array
