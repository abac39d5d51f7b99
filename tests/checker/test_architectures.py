"""The table against the installed transformers: read from its source, and measured on models that run."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attemper.checker.architectures import _INVERSE_SQRT, ARCHITECTURES, architecture
from attemper.checker.scales_expected import expected_scale
from tests.capture.architectures import HEAD_DIM, HIDDEN, LAYERS, TOKENS, build

transformers = pytest.importorskip("transformers")
MODELS = Path(transformers.__file__).parent / "models"

WIDTH = (
    r"(self\.|config\.)?(attention_)?head_(dim|size)|(self\.)?(dim_head|qk_head_dim|dim_per_head)|key_dim|(config\.)?d_head"
    r"|expanded_head_dim"
)
INTERNAL = r"\(self\.internal_dim // config\.num_attention_heads\)"
INVERSE_SQRT = re.compile(
    rf"\(?({WIDTH}|{INTERNAL})\)? ?\*\* ?\(?-0\.5\)?$|1(\.0)? / (math\.)?sqrt\(({WIDTH})\)$|1(\.0)? / \(({WIDTH}) ?\*\* ?0\.5\)$"
    rf"|float\(1\.0 / np\.sqrt\(projection_dim\)\)$|math\.sqrt\(self\.head_size\)$|scale$"
)

OWN_SCALE = re.compile(r"^\s+self\.(?:scaling|scale|norm_factor|scale_attn\w*) = ([^#\n]+?)\s*(?:#.*)?$", re.MULTILINE)
PASSED_SCALE = re.compile(r"^\s+scaling=([^,\n]+),", re.MULTILINE)


def attention_classes(package: str) -> dict[str, str]:
    """Source of the attention classes of one package, by name."""
    found = {}
    for path in sorted((MODELS / package).glob("modeling_*.py")):
        for chunk in re.split(r"\n(?=class )", path.read_text("utf-8")):
            name = re.match(r"class (\w+)", chunk)
            if name and ("attention_interface" in chunk or "Attention" in name[1]):
                found[name[1]] = chunk
    return found


def test_a_name_has_one_rule() -> None:
    names = [name for row in ARCHITECTURES for name in row.names.split()]
    assert len(names) > 380
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_every_name_is_one_of_transformers() -> None:
    # a package, a model_type, or a class: a row that can never be reached would say nothing
    sources = "".join(path.read_text("utf-8") for path in MODELS.glob("*/configuration_*.py"))
    known = {path.name for path in MODELS.iterdir()} | set(re.findall(r'model_type = "([^"]+)"', sources)) | {"ngpt"}
    known |= {
        name
        for package in ("evolla", "gemma3n", "gemma4", "inkling", "step3p7", "videoprism", "cvt")
        for name in attention_classes(package)
    }
    assert sorted(name for row in ARCHITECTURES for name in row.names.split() if name not in known) == []


def test_the_packages_listed_with_the_usual_rule_write_it_down() -> None:
    odd = {}
    for package in _INVERSE_SQRT.split():
        for name, source in attention_classes(package).items():
            if architecture(name) is not None or name.endswith("Loss"):
                continue  # has a row of its own
            own = re.findall(
                r"^\s+self\.(?:scaling|scale|norm_factor|scale_attn\w*) = ([^#\n]+?)\s*(?:#.*)?$", source, re.MULTILINE
            )
            passed = re.findall(r"^\s+scaling=([^,\n]+),", source, re.MULTILINE)
            wrong = [line for line in own if not INVERSE_SQRT.match(line)]
            wrong += [line for line in passed if not re.match(r"(self\.)?(scaling|scale)$|None|self\.head_dim\*\*-0\.5", line)]
            if wrong:
                odd[name] = wrong
    assert odd == {}


@dataclass(frozen=True)
class Measured:
    """How to measure one model: where its attention is, and which outputs are q and k before anything scales them.

    RoPE is switched off by giving every token position 0, norms are left in (q and k are read behind them).
    """

    name: str
    module: str
    query: str = "q_proj"
    key: str = "k_proj"
    config: tuple[tuple[str, Any], ...] = ()
    positions: bool = True
    weights: str = "attentions"
    layer: int = 0


_LLAMA = "model.layers.{}.self_attn"
_BERT = ("encoder.layer.{}.attention.self", "query", "key")
_NORMS = {"query": "q_norm", "key": "k_norm"}
_T5 = {"query": "q", "key": "k", "positions": False, "weights": "encoder_attentions"}
_WHISPER = {"positions": False, "weights": "encoder_attentions"}

MEASURED = (
    *(Measured(name, _LLAMA) for name in ("llama", "mistral", "mixtral", "qwen2", "gemma", "starcoder2", "gpt_oss", "granite")),
    *(Measured(name, _LLAMA, layer=1) for name in ("smollm3", "glm4", "nemotron", "granite_swa", "ministral3")),
    Measured("granite", _LLAMA, config=(("attention_multiplier", 0.31),)),
    Measured("granite_swa", _LLAMA, config=(("attention_multiplier", 0.31),)),
    Measured("gemma2", _LLAMA, config=(("attn_logit_softcapping", None),)),
    Measured("gemma2", _LLAMA, config=(("attn_logit_softcapping", None), ("query_pre_attn_scalar", 29))),
    *(Measured(name, _LLAMA, **_NORMS) for name in ("qwen3", "gemma3", "gemma4", "gemma3n", "olmo2", "cohere", "exaone4")),
    Measured("gemma3", _LLAMA, **_NORMS, config=(("query_pre_attn_scalar", 29),)),
    Measured("llama4", _LLAMA, config=(("use_qk_norm", False), ("no_rope_layers", [0, 0]), ("floor_scale", 8192))),
    Measured("zamba2", "model.layers.2.shared_transformer.self_attn", positions=False),
    Measured("opt", "model.decoder.layers.{}.self_attn", positions=False),
    Measured("gpt_neo", "transformer.h.{}.attn.attention", positions=False),
    Measured("gpt2", "transformer.h.{}.attn", query="c_attn", key="c_attn"),
    Measured("gpt2", "transformer.h.{}.attn", "c_attn", "c_attn", (("scale_attn_by_inverse_layer_idx", True),), layer=1),
    Measured("gpt2", "transformer.h.{}.attn", "c_attn", "c_attn", (("scale_attn_weights", False),), layer=1),
    Measured(
        "gpt2",
        "transformer.h.{}.attn",
        "c_attn",
        "c_attn",
        (("scale_attn_weights", False), ("scale_attn_by_inverse_layer_idx", True)),
        layer=1,
    ),
    Measured("openai_privacy_filter", "layers.{}.self_attn"),
    *(Measured(name, *_BERT, positions=False) for name in ("bert", "roberta", "electra")),
    Measured("esm", *_BERT, config=(("position_embedding_type", "absolute"),), positions=False),
    Measured("distilbert", "transformer.layer.{}.attention", "q_lin", "k_lin", positions=False),
    Measured("albert", "encoder.albert_layer_groups.0.albert_layers.0.attention", "query", "key", positions=False),
    *(Measured(name, "encoder.block.{}.layer.0.SelfAttention", **_T5) for name in ("t5", "mt5")),
    Measured("whisper", "model.encoder.layers.{}.self_attn", **_WHISPER),
    Measured("bart", "model.encoder.layers.{}.self_attn", **_WHISPER),
)


@pytest.mark.parametrize("case", MEASURED, ids=lambda case: "-".join([case.name, *(f"{k}={v}" for k, v in case.config)]))
def test_the_table_gives_the_scale_that_the_model_applies(case: Measured) -> None:
    """The slope of ln p over q·k, from the model's own attention weights and the outputs of its projections."""
    model, inputs = build(case.name, attn="eager", padding="none", gain=3.0, **dict(case.config))
    if case.positions:
        inputs |= {
            "position_ids": torch.zeros(1, TOKENS, dtype=torch.long),
            "attention_mask": torch.ones_like(inputs["input_ids"]),
        }
    for name, weight in model.named_parameters():
        if "relative_attention_bias" in name:
            nn.init.zeros_(weight)
    module = case.module.format(case.layer)
    seen = _outputs(model, module, {case.query, case.key})
    with torch.no_grad():
        weights = getattr(model(**inputs, output_attentions=True), case.weights)[case.layer]
    heads = weights.shape[1]
    query, key = seen[case.query], seen[case.key]
    if case.query == case.key:  # one projection for q, k and v
        query, key, _ = query.chunk(3, dim=-1)
    head_dim = _head_dim(model, module)
    query, key = _by_head(query, head_dim), _by_head(key, head_dim)
    products = query.double() @ key.double().repeat_interleave(heads // key.shape[1], dim=1).mT
    slope, residual = _slope(products, weights.double())

    expected = expected_scale(model, module, head_dim=head_dim, heads=heads)

    assert expected.certain
    assert residual < 1e-3, "the logits are not a multiple of q·k, so this case measures something else"
    assert slope == pytest.approx(expected.value, rel=1e-3)


def test_the_measurement_tells_a_wrong_scale() -> None:
    products = torch.randn(2, 3, 5, 7, dtype=torch.float64)
    slope, residual = _slope(products, torch.softmax(0.31 * products, -1))
    assert slope == pytest.approx(0.31, rel=1e-9)
    assert residual < 1e-9
    assert _slope(products, torch.softmax(0.31 * products + torch.randn(7), -1))[1] > 0.1


def _head_dim(model: nn.Module, module: str) -> int:
    inner = model.get_submodule(module)
    names = ("head_dim", "attention_head_size", "key_value_proj_dim")
    return next(int(getattr(inner, name)) for name in names if hasattr(inner, name))


def _outputs(model: nn.Module, module: str, names: set[str]) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}
    for name in names:
        hook = lambda _module, _inputs, output, name=name: seen.setdefault(name, output)  # noqa: E731
        model.get_submodule(f"{module}.{name}").register_forward_hook(hook)
    return seen


def _by_head(projected: Tensor, head_dim: int) -> Tensor:
    """[batch, heads, tokens, d], from [batch, tokens, heads · d] or from either order of heads and tokens."""
    if projected.dim() == 3:
        return projected.unflatten(-1, (-1, head_dim)).transpose(1, 2)
    return projected.transpose(1, 2) if projected.shape[1] == TOKENS else projected


def _slope(products: Tensor, weights: Tensor) -> tuple[float, float]:
    """Least squares of ln p on q·k over each row's visible keys, and the share of ln p's spread that it leaves."""
    visible = weights > 0
    count = visible.sum(-1, keepdim=True).clamp(min=1)
    logs = weights.clamp(min=torch.finfo(weights.dtype).tiny).log().where(visible, torch.zeros_like(weights))
    logs = (logs - logs.sum(-1, keepdim=True) / count).where(visible, torch.zeros_like(weights))
    products = products.where(visible, torch.zeros_like(products))
    products = (products - products.sum(-1, keepdim=True) / count).where(visible, torch.zeros_like(products))
    slope = ((products * logs).sum() / products.square().sum()).item()
    return slope, ((logs - slope * products).norm() / logs.norm()).item()


def test_multi_latent_attention_applies_mscale_squared() -> None:
    model, _ = build("deepseek_v3")
    module = "model.layers.0.self_attn"
    expected = expected_scale(model, module, head_dim=10)
    mscale = 0.1 * math.log(40.0) + 1
    assert expected.value == pytest.approx(10**-0.5 * mscale**2, rel=1e-12)
    assert expected.value == pytest.approx(model.get_submodule(module).scaling, rel=1e-12)


def test_sizes_tell_rules_apart() -> None:
    assert len({HEAD_DIM, HIDDEN, LAYERS, TOKENS, HIDDEN // 4}) == 5
