"""Which norm stands in front of an attention module: a table of where models keep it, since without a run nothing shows it."""

import re

from torch import nn

# Children of the block (or of the block around it) that normalise what goes into attention.
_PRE = ("input_layernorm", "ln_1", "layernorm_before", "layer_norm1", "attention_norm", "attn_norm")
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
_OTHER_SOURCE = re.compile(r"cross|encoder_attn|EncDec", re.IGNORECASE)  # keys come from elsewhere


def norm_before(model: nn.Module, attention: str) -> str | None:
    """The dotted name of the norm whose output an attention module projects to q and k; None where it is not known."""
    modules = dict(model.named_modules())
    if _OTHER_SOURCE.search(attention):
        return None
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
