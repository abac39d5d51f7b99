"""One table of model families: where q and k are projected, and what stands behind the projections.

A row is chosen by the names of the attention module's children and, where the same name means several layouts (fused
projections), by its class too. What no row fits is not guessed: it raises and says what to pass.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attemper.errors import ArgumentError, UnsupportedError
from attemper.weights.layout import Heads, Projections
from attemper.weights.norms import gain

Split = Callable[[nn.Module, int, int, int], tuple[Tensor, Tensor]]  # attention module, outputs, heads, d -> features of q and k


def _blocks(module: nn.Module, outputs: int, heads: int, width: int) -> tuple[Tensor, Tensor]:
    """[q of all heads; k of the key heads; v of as many]."""
    key_heads = (outputs // width - heads) // 2
    features = torch.arange(outputs, device="cpu").view(-1, width)
    return features[:heads], features[heads : heads + key_heads]


def _by_head(module: nn.Module, outputs: int, heads: int, width: int) -> tuple[Tensor, Tensor]:
    """[heads, (q, k, v), d]."""
    features = torch.arange(outputs, device="cpu").view(heads, 3, width)
    return features[:, 0], features[:, 1]


def _by_group(module: nn.Module, outputs: int, heads: int, width: int) -> tuple[Tensor, Tensor]:
    """[key heads, (its q's, k, v), d]: falcon's three layouts, in which one key head, or one for each head, are the limits."""
    key_heads = (outputs // width - heads) // 2
    features = torch.arange(outputs, device="cpu").view(key_heads, heads // key_heads + 2, width)
    return features[:, :-2].reshape(-1, width), features[:, -2]


def _by_multi_query(module: nn.Module, outputs: int, heads: int, width: int) -> tuple[Tensor, Tensor]:
    """GPTBigCode: blocks with one key head, or by head."""
    return (_blocks if getattr(module, "multi_query", True) else _by_head)(module, outputs, heads, width)


def _by_shard(module: nn.Module, outputs: int, heads: int, width: int) -> tuple[Tensor, Tensor]:
    """CodeGen: [4 shards, (q, v, k), its heads, d]."""
    features = torch.arange(outputs, device="cpu").view(_number((module,), ("mp_num",)) or 4, 3, -1)
    return features[:, 0].reshape(heads, width), features[:, 2].reshape(heads, width)


@dataclass(frozen=True)
class Family:
    """One way in which models hold their projections.

    Attributes:
        models: who does so. query, key, value: names of the children that project; the same name where they are fused.
        split: which outputs of a fused projection make q and k; None where they are separate.
        classes: pattern of the attention class's name; "" for any.
    """

    models: str
    query: str
    key: str
    value: str
    split: Split | None = None
    classes: str = ""


FAMILIES: tuple[Family, ...] = (
    Family("llama, mistral, qwen2, gemma, phi, opt, bart, whisper, clip, vit, gptj, …", "q_proj", "k_proj", "v_proj"),
    Family("bert, roberta, electra, esm, albert, …", "query", "key", "value"),
    Family("t5, mt5, …", "q", "k", "v"),
    Family("distilbert", "q_lin", "k_lin", "v_lin"),
    Family("diffusers, and hand-written ones", "to_q", "to_k", "to_v"),
    Family("hand-written ones, after Llama's own code", "wq", "wk", "wv"),
    Family("gpt2 (cross attention too)", "c_attn", "c_attn", "c_attn", _blocks, r"^GPT2"),
    Family("gpt_bigcode", "c_attn", "c_attn", "c_attn", _by_multi_query, r"^GPTBigCode"),
    Family("phi3", "qkv_proj", "qkv_proj", "qkv_proj", _blocks, r"^Phi3"),
    Family("codegen", "qkv_proj", "qkv_proj", "qkv_proj", _by_shard, r"^CodeGen"),
    Family(
        "gpt_neox, gpt_neox_japanese, bloom, persimmon",
        *("query_key_value",) * 3,
        _by_head,
        r"^(GPTNeoX|GPTNeoXJapanese|Bloom|Persimmon)",
    ),
    Family("falcon", "query_key_value", "query_key_value", "query_key_value", _by_group, r"^Falcon"),
    Family("modernbert, mpt", "Wqkv", "Wqkv", "Wqkv", _blocks, r"^(ModernBert|Mpt)Attention"),
    Family("blip, blip_2 (vision)", "qkv", "qkv", "qkv", _blocks, r"^(Blip|Blip2)Attention"),
)

# MLA: q is [heads, (no position, rotary)], kv_b_proj gives [heads, (k without position, v)], and all heads share one rotary key.
MLA = r"^(Deepseek(V2|V3|V32)|MiniCPM3|Youtu|Glm4MoeLite|Mistral4|LongcatFlash|KimiLinear)"

# Norms on q and k that come after the projection.
_NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"), ("query_layernorm", "key_layernorm"), ("query_norm", "key_norm"))
_NORMS += (("norm_q", "norm_k"), ("q_ln", "k_ln"), ("ln_q", "ln_k"))
_QK_NORM = re.compile(r"(q|k|qk|query|key)[^.]*norm|norm_(q|k)$|(q|k)_ln$|ln_(q|k)$")
# What stands between a projection and the product, or beside it, and makes the logits more than factor · q·k.
_OTHER_TERMS = ("pos_key_proj", "pos_query_proj", "pos_bias_u", "pos_bias_v", "linear_pos", "distance_embedding", "r_w_bias")
_OTHER_TERMS += ("rel_pos_h", "relative_k_proj", "query_global")

_LINEAR = re.compile(r"(Linear(\d+bit\w*)?|^Conv1D)$")
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_attention_heads_per_partition", "heads")
_WIDTHS = ("qk_head_dim", "head_dim", "head_size", "attention_head_size", "key_value_proj_dim")


def find_projections(
    model: nn.Module, layouts: Mapping[str, Projections] | None = None, only: Collection[str] | None = None
) -> dict[str, Projections]:
    """Where q and k are projected, for every attention module of a model.

    Args:
        model: any module.
        layouts: what you say of modules that the table does not know, or knows wrongly, by their names.
        only: names of the attention modules that are asked for; None: all. Others may have a layout that is not known.

    Raises:
        UnsupportedError: a module that looks like attention has an unknown layout, or its logits are no factor times q·k.
        ArgumentError: layouts or only name what is no (attention) module of the model, or it has none at all.
    """
    return find_named("only", model, layouts, only)


def find_named(
    argument: str, model: nn.Module, layouts: Mapping[str, Projections] | None, only: Collection[str] | None
) -> dict[str, Projections]:
    """`find_projections` for a function whose own argument, which errors name, says which modules are asked for."""
    if not isinstance(model, nn.Module):
        raise ArgumentError("model", type(model).__name__, "a torch.nn.Module")
    layouts = dict(layouts or {})
    modules = dict(model.named_modules())
    for name in layouts:
        if name not in modules:
            raise ArgumentError("layouts", repr(name), "names of modules of the model, as named_modules() gives them")
    found = {}
    for name, module in modules.items():
        if only is not None and name not in only:
            continue
        if name in layouts:
            found[name] = layouts[name]
            continue
        projections = _of(name, module, getattr(model, "config", None))
        if projections is not None:
            found[name] = projections
    missing = [name for name in only or () if name not in found]
    if missing:
        known = [name for name, module in modules.items() if re.search(r"Attention|Attn|MLA", type(module).__name__)]
        raise ArgumentError(
            argument, repr(missing[0]), f"names of attention modules, such as {', '.join(known) or 'this model has none'}"
        )
    if not found and only is None:
        expected = "a model with attention modules of a known layout, or layouts={name: Projections(...)}"
        raise ArgumentError("model", f"{type(model).__name__} without any", expected)
    return found


def find_known(
    model: nn.Module, layouts: Mapping[str, Projections] | None = None
) -> tuple[dict[str, Projections], dict[str, str]]:
    """What `find_projections` gives of the attention modules whose layout is known, and of the others the reason, by name.

    Raises:
        ArgumentError: model is no module, or layouts name what is none of its modules.
    """
    found, reasons = find_named("layouts", model, layouts, set(layouts or {})), {}
    for name, _ in model.named_modules():
        if name not in found:
            try:
                projections = projections_of(model, name)
            except UnsupportedError as error:
                reasons[name] = str(error)
            else:
                if projections is not None:
                    found[name] = projections
    order = [name for name, _ in model.named_modules()]
    return {name: found[name] for name in order if name in found}, reasons


def projections_of(model: nn.Module, name: str) -> Projections | None:
    """Where q and k are projected in one module of a model; None where it is no attention.

    Raises:
        UnsupportedError: it looks like attention, and its layout is not known.
    """
    return _of(name, model.get_submodule(name), getattr(model, "config", None))


def value_weight(module: nn.Module, projections: Projections) -> tuple[str, Tensor | None] | None:
    """The parameter that projects the values of an attention module, and which of its outputs do (None: all of them).

    None where it is not known.
    """
    query, key = projections.query, projections.key
    if key is not None and query.dim is not None and key.dim is not None:
        # Fused with q and k, or, as in MLA and in GPT-2's cross attention, with k alone: what is left of the outputs.
        name = key.parameters[0]
        others = torch.ones(module.get_parameter(name).shape[key.dim], dtype=torch.bool, device="cpu")
        for heads in (query, key):
            if heads.parameters[0] == name:
                others[heads.features.flatten()] = False
        if bool(others.any()):
            return name, torch.nonzero(others).flatten()
    if getattr(module, "v_proj_weight", None) is not None:  # torch's, with kdim or vdim
        return "v_proj_weight", None
    children = {child for child, one in module.named_children() if is_linear(one)}
    for family in FAMILIES:
        if family.split is None and {family.query, family.value} <= children:
            return f"{family.value}.weight", None
    return None


def _of(name: str, module: nn.Module, config: Any) -> Projections | None:
    if hasattr(module, "in_proj_bias") and hasattr(module, "in_proj_weight"):
        return _multihead(name, module)
    kind = type(module).__name__
    children = {child for child, one in module.named_children() if is_linear(one)}
    if "kv_b_proj" in children and re.search(MLA, kind):
        return _latent(name, module)
    for family in FAMILIES:
        named = family.query in children and (family.key in children or getattr(module, "is_kv_shared_layer", False))
        if named and re.search(family.classes, kind) and not _is_latent(children):
            return _described(name, module, family, getattr(module, "config", config))
    looks = re.search(r"Attention|Attn|MLA", kind) and not re.search(r"Output|Block|Layer$", kind)
    if looks and (len(children) >= 2 or _is_latent(children)):
        expected = f"pass layouts={{{name!r}: Projections(query=Heads(...), key=Heads(...))}} to say where q and k are made"
        raise UnsupportedError(
            f"{name or 'the model'} ({kind} with {', '.join(sorted(children))}) has no row in the table: {expected}"
        )
    return None


def _described(name: str, module: nn.Module, family: Family, config: Any) -> Projections:
    _refuse(name, module, config)
    cross = family.split is not None and isinstance(getattr(module, "q_attn", None), nn.Module)
    query_name = "q_attn" if cross else family.query  # GPT-2's cross attention: q apart, [k; v] fused
    query, key = module.get_submodule(query_name), getattr(module, family.key, None)
    fused = family.split is not None and not cross
    width, heads = _sizes(name, module, _outputs(query), config, fused)
    if family.split is not None and fused:
        q_features, k_features = family.split(module, _outputs(query), heads, width)
    else:  # q may be followed by a gate, as in qwen3_next, or k by v
        q_features = torch.arange(heads * width, device="cpu").view(heads, width)
        k_features = None if key is None else _rows(_outputs(key) // (2 if cross else 1), width)
    q_heads = Heads(_parameters(query_name, query), q_features, _dim(query))
    k_heads = None if key is None or k_features is None else Heads(_parameters(family.key, key), k_features, _dim(key))
    gains = _gains(name, module, heads, None if k_heads is None else k_heads.count, width)
    if gains is not None:
        q_heads, k_heads = gains
    elif not fused and _outputs(query) != heads * width:  # a gate beside q, two maps a head: who knows in which order
        raise _misfit(name, module, _outputs(query), heads, width)
    elif getattr(module, family.value, None) is None:
        k_heads = None  # values are made of k
    if _read_elsewhere(module):
        k_heads = None
    return Projections(
        q_heads,
        k_heads,
        heads=heads,
        weights=tuple(f"{one}.weight" for one in dict.fromkeys((query_name, *(() if key is None else (family.key,))))),
        unfoldable="alibi is multiplied by the scale here, and folding would not reach it"
        if _scaled_alibi(module, config)
        else "",
    )


def _latent(name: str, module: nn.Module) -> Projections:
    """MLA."""
    _refuse(name, module, getattr(module, "config", None))
    nope, rope, value = (int(getattr(module, f"{part}_head_dim")) for part in ("qk_nope", "qk_rope", "v"))
    query = "q_b_proj" if isinstance(getattr(module, "q_b_proj", None), nn.Module) else "q_proj"
    q, kv = module.get_submodule(query), module.get_submodule("kv_b_proj")
    return Projections(
        Heads(_parameters(query, q), _rows(_outputs(q), nope + rope), _dim(q)),
        Heads(_parameters("kv_b_proj", kv), _rows(_outputs(kv), nope + value)[:, :nope], _dim(kv)),
        shared_key=rope,
    )


def _multihead(name: str, module: Any) -> Projections:
    """torch.nn.MultiheadAttention, and attemper's, which has its parameters and a layout of heads, and may have norms."""
    layout = getattr(module, "layout", None)
    heads = int(module.num_heads)
    widths = {int(module.embed_dim) // heads} if layout is None else set(layout.widths)
    if len(widths) > 1:
        raise UnsupportedError(f"{name} has heads of widths {sorted(widths)}, which one matrix of features cannot describe")
    width, key_heads = widths.pop(), heads if layout is None else len(layout.kv_widths)
    packed = module.in_proj_weight is not None
    bias = () if module.in_proj_bias is None else ("in_proj_bias",)
    query = Heads(("in_proj_weight" if packed else "q_proj_weight", *bias), _rows(heads * width, width))
    key_features = _rows(key_heads * width, width)
    if packed:
        key = Heads(("in_proj_weight", *bias), key_features + heads * width)
    else:  # with kdim or vdim the outputs of k are counted differently in its weight and in the bias
        key = None if bias else Heads(("k_proj_weight",), key_features)
    if module.bias_k is not None:  # one more key, which is no output of the projection
        key = None
    norm = getattr(module, "qk_norm", None)
    if norm is not None:
        query = gain(name, "qk_norm.q_norm", norm.q_norm, heads, width)
        key = gain(name, "qk_norm.k_norm", norm.k_norm, key_heads, width)
    weights = ("in_proj_weight",) if packed else ("q_proj_weight", "k_proj_weight")
    return Projections(query, key, heads=heads, weights=weights)


def _refuse(name: str, module: nn.Module, config: Any) -> None:
    where = f"{name} ({type(module).__name__})"
    attention = getattr(config, "attn_config", None)
    clamp = next((value for one in (module, config, attention) if (value := getattr(one, "clip_qkv", None)) is not None), None)
    if clamp:
        raise UnsupportedError(f"{where} clamps q and k at clip_qkv={clamp}: no factor on the projection is one on the logits")
    if getattr(module, "logit_scale", None) is not None:
        raise UnsupportedError(f"{where} divides q and k by their lengths: no factor on the projection reaches the logits")
    added = next((part for part in ("add_q_proj", "add_k_proj") if getattr(module, part, None) is not None), None)
    if added:  # joint attention, as in Flux: half of the tokens would be left out
        raise UnsupportedError(f"{where} makes q and k of other tokens by {added}, which edits of to_q and to_k do not reach")
    other = next((part for part in _OTHER_TERMS if getattr(module, part, None) is not None), None)
    if other:
        raise UnsupportedError(f"{where} adds products of {other} to q·k, which no factor on q multiplies alike")


def _gains(name: str, module: nn.Module, heads: int, key_heads: int | None, width: int) -> tuple[Heads, Heads | None] | None:
    """The gains of norms behind q and k; None where there are no norms."""
    norms = {child: one for child, one in module.named_children() if _QK_NORM.search(child) and not isinstance(one, nn.Identity)}
    if not norms:
        return None
    for query, key in _NORMS:
        if query in norms and set(norms) <= {query, key} and (key in norms or key_heads is None):
            of_key = None if key_heads is None else gain(name, key, norms[key], key_heads, width)
            return gain(name, query, norms[query], heads, width), of_key
    kinds = ", ".join(f"{child} ({type(one).__name__})" for child, one in norms.items())
    expected = f"pass layouts={{{name!r}: Projections(...)}} to say which gains to multiply"
    raise UnsupportedError(f"{name} has norms that the table does not know: {kinds}; {expected}")


def _read_elsewhere(module: nn.Module) -> bool:
    """Whether other layers take their keys from this one: gemma3n, gemma4."""
    return bool(getattr(module, "store_full_length_kv", False))


def _scaled_alibi(module: nn.Module, config: Any) -> bool:
    return type(module).__name__.startswith("Falcon") and bool(getattr(config, "alibi", False))


def _sizes(name: str, module: nn.Module, outputs: int, config: Any, fused: bool) -> tuple[int, int]:
    """Width and number of q's heads, from the module's own attributes first."""
    width, heads = (_number((module,), names) or _number((config,), names) for names in (_WIDTHS, _HEADS))
    if heads is None and width and not fused:
        heads = outputs // width
    if width is None and heads and not fused:
        width = outputs // heads
    if not width or not heads or outputs % width or heads * width > outputs:
        raise _misfit(name, module, outputs, heads, width)
    return width, heads


def _misfit(name: str, module: nn.Module, outputs: int, heads: int | None, width: int | None) -> UnsupportedError:
    given = f"{name} ({type(module).__name__}): {outputs} outputs of q's projection, {heads} heads of width {width}"
    return UnsupportedError(f"{given} do not fit one another; pass layouts={{{name!r}: Projections(...)}}")


def _number(places: tuple[Any, ...], names: tuple[str, ...]) -> int | None:
    return next((value for place in places for name in names if isinstance(value := getattr(place, name, None), int)), None)


def _is_latent(children: set[str]) -> bool:
    return any(re.match(r"kv_(a|b)_proj", child) for child in children)


def is_linear(module: nn.Module) -> bool:
    """A projection by type, or by the name of its class where a library wraps it."""
    return isinstance(module, nn.Linear) or bool(_LINEAR.search(type(module).__name__))


def _outputs(projection: nn.Module) -> int:
    weight = getattr(projection, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        shape = list(weight.shape) if isinstance(weight, Tensor) else None
        raise UnsupportedError(f"{type(projection).__name__} has no weight matrix (its weight: {shape}): edit before quantising")
    return weight.shape[_dim(projection)]


def _dim(projection: nn.Module) -> int:
    return 1 if type(projection).__name__ == "Conv1D" else 0


def _parameters(name: str, projection: nn.Module) -> tuple[str, ...]:
    return tuple(f"{name}.{part}" for part in ("weight", "bias") if getattr(projection, part, None) is not None)


def _rows(outputs: int, width: int) -> Tensor:
    return torch.arange(outputs, device="cpu").view(-1, width)
