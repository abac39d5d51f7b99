"""Which norm stands in front of an attention module: a table of where models keep it, since without a run nothing shows it."""

import re
from typing import NamedTuple

from torch import nn

# Children of the block (or of the block around it) that normalise what goes into attention.
_PRE = ("input_layernorm", "pre_self_attn_layernorm", "ln_1", "layernorm_before", "layer_norm1", "attention_norm", "attn_norm")
# Blocks whose norm of this name comes first only in some classes.
_BY_CLASS = (
    ("self_attn_layer_norm", r"^(Whisper|Pegasus|MBart|Blenderbot(?!Small)|M2M100|XGLM|Speech2Text|GPTNeo)"),
    ("norm1", r"^Dinov2Layer$"),
    ("layer_norm", r"^(T5|MT5|UMT5|LongT5|SwitchTransformers)LayerSelfAttention"),
)
# Where the last block's norm, or the embedding's, is what goes in: (pattern of the attention's name, norm of block i - 1, norm of
# the embedding).
_POST = (
    (r"^(?P<stem>.*?)encoder\.layer\.(?P<i>\d+)\.attention\.self$", "encoder.layer.{i}.output.LayerNorm", "embeddings.LayerNorm"),
    (
        r"^(?P<stem>.*?)transformer\.layer\.(?P<i>\d+)\.attention$",
        "transformer.layer.{i}.output_layer_norm",
        "embeddings.LayerNorm",
    ),
)
# Cross attention: (pattern of the block's class, its norm in front of the queries, the norm that the encoder ends in).
_CROSS = (
    (r"^(Whisper|Pegasus|MBart|Blenderbot(?!Small)|M2M100|Speech2Text)", "encoder_attn_layer_norm", "layer_norm"),
    (r"^(T5|MT5|UMT5|LongT5|SwitchTransformers)LayerCrossAttention", "layer_norm", "final_layer_norm"),
    (r"^T5GemmaDecoderLayer", "pre_cross_attn_layernorm", "norm"),
)
_OTHER_SOURCE = re.compile(r"cross|encoder_attn|EncDec", re.IGNORECASE)  # keys come from elsewhere
_DECODER = re.compile(r"^(?P<stem>.*\.)?decoder\.")  # the innermost: an encoder beside an outer one may be projected first


class Norms(NamedTuple):
    """Dotted names of the norms whose outputs are projected to q and to k: the same one, but in cross attention."""

    query: str
    key: str

    def __str__(self) -> str:
        return self.query if self.query == self.key else f"{self.query}, keys: {self.key}"


def norms_before(model: nn.Module, attention: str) -> Norms | None:
    """The norms in front of an attention module; None where they are not known."""
    modules = dict(model.named_modules())
    if is_cross(attention):
        return _of_cross(modules, attention)
    before = _of_self(modules, attention)
    return None if before is None else Norms(before, before)


def is_cross(attention: str) -> bool:
    """Whether an attention module's name says that its keys come from elsewhere, such as an encoder."""
    return _OTHER_SOURCE.search(attention) is not None


def _of_cross(modules: dict[str, nn.Module], attention: str) -> Norms | None:
    path = attention.rpartition(".")[0]
    decoder = _DECODER.match(path)
    if decoder is None:
        return None
    for classes, of_query, of_encoder in _CROSS:
        if re.search(classes, type(modules[path]).__name__):
            norms = Norms(f"{path}.{of_query}", f"{decoder['stem'] or ''}encoder.{of_encoder}")
            return norms if all(_is_norm(modules.get(name)) for name in norms) else None
    return None


def _of_self(modules: dict[str, nn.Module], attention: str) -> str | None:
    for pattern, of_block, of_embedding in _POST:
        if found := re.match(pattern, attention):
            number = int(found["i"])
            name = found["stem"] + (of_block.format(i=number - 1) if number else of_embedding)
            return name if _is_norm(modules.get(name)) else None
    path = attention
    for _ in range(2):
        path, _, last = path.rpartition(".")
        if not last:
            break
        block = modules[path]
        name = _of_block(block)
        if name:
            return f"{path}.{name}" if path else name
        if isinstance(block, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
            break
    return None


def _of_block(block: nn.Module) -> str:
    if isinstance(block, nn.TransformerEncoderLayer):
        return "norm1" if block.norm_first else ""
    for name in _PRE:
        if _is_norm(getattr(block, name, None)):
            return name
    kind = type(block).__name__
    if kind.startswith("OPT") and getattr(block, "do_layer_norm_before", False):
        return "self_attn_layer_norm"
    return next((name for name, classes in _BY_CLASS if re.search(classes, kind) and _is_norm(getattr(block, name, None))), "")


def _is_norm(module: nn.Module | None) -> bool:
    """By the name of its class, with a gain."""
    return module is not None and "Norm" in type(module).__name__ and "weight" in module._parameters and module.weight is not None
