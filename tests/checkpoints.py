"""Tiny checkpoint folders in Hugging Face's layout, made by the tests that need them."""

import json
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from attemper.checker.passage import PASSAGE

WIDTH, HEADS, HEAD_DIM, LAYERS = 40, 5, 8, 3


def llama(**changes: Any) -> nn.Module:
    """A random decoder of three layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "vocab_size": 311,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "intermediate_size": 53,
        "max_position_embeddings": 61,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(7)
    return LlamaForCausalLM(LlamaConfig(**settings | changes)).eval()


def bert(**changes: Any) -> nn.Module:
    """A random encoder of two layers."""
    from transformers import BertConfig, BertModel

    settings = {
        "vocab_size": 311,
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "intermediate_size": 53,
        "max_position_embeddings": 61,
        "pad_token_id": 0,
    }
    torch.manual_seed(7)
    return BertModel(BertConfig(**settings | changes), add_pooling_layer=False).eval()


def save(model: nn.Module, folder: Path, *, tokenizer: bool = True, **settings: Any) -> Path:
    """Write a model, and a tokenizer of the built-in passage's words beside it."""
    model.save_pretrained(folder, **settings)
    if tokenizer:
        word_tokenizer().save_pretrained(folder)
    return folder


def word_tokenizer(text: str = PASSAGE) -> Any:
    """One id for each word of a text, the built-in passage if none is given."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    split = pre_tokenizers.Whitespace()
    words = sorted({word for word, _ in split.pre_tokenize_str(text)})
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[BOS]", "[EOS]", "[UNK]", *words])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = split
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", bos_token="[BOS]", eos_token="[EOS]", unk_token="[UNK]"
    )


def config_only(folder: Path, **changes: Any) -> Path:
    """A folder with a configuration and no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]} | changes))
    return folder


def raw_safetensors(file: Path, header: Any, data: bytes = b"") -> Path:
    """A safetensors file with whatever header, true or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return file


def tensors(file: Path, **values: torch.Tensor) -> Path:
    """A proper safetensors file."""
    save_file(values, file)
    return file
