"""The table of families: every row is held by a model, and what no row fits raises and says what to pass."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attemper
from attemper import scales
from attemper.errors import ArgumentError, UnsupportedError
from attemper.weights import Heads, Projections, find_projections, fold_scale, qk_clip_
from attemper.weights.families import FAMILIES
from tests.capture.architectures import _MLA, ARCHITECTURES, build
from tests.scales.huggingface import _MISTRAL4_ROPE
from tests.weights.test_clip import FAMILIES as CLIPPED
from tests.weights.test_fold import FROM, FUSED, LATENT, NORMED, SEPARATE, TO, calls_of, engine, products

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own
transformers = pytest.importorskip("transformers")

# What the table refuses, and why.
REFUSED = {
    "llama4": r"norms that the table does not know: qk_norm \(Llama4TextL2Norm\)",
    "deberta_v2": r"DisentangledSelfAttention with key_proj, .* has no row in the table",
    "swinv2": r"Swinv2SelfAttention\) divides q and k by their lengths",
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_of_the_sweep_is_found_or_refused(name: str) -> None:
    model, _ = build(name)
    if name in REFUSED:
        with pytest.raises(UnsupportedError, match=REFUSED[name]):
            find_projections(model)
        return
    found = find_projections(model)
    assert len(found) == (ARCHITECTURES[name].calls if name != "albert" else 1) or not ARCHITECTURES[name].calls
    for module, projections in found.items():
        parameters = dict(model.get_submodule(module).named_parameters())
        assert set(projections.query.parameters) | set(projections.weights) <= set(parameters)


def of(config: str, model: str, **fields: Any) -> nn.Module:
    torch.manual_seed(7)
    settings = getattr(transformers, config)(**fields)
    return getattr(transformers, model)._from_config(settings, attn_implementation="eager").eval()


SMALL = {"vocab_size": 61, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_inner": 37, "n_positions": 32}
DEEP = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION = DEEP | {"intermediate_size": 37, "image_size": 20, "patch_size": 5}
JAPANESE = DEEP | {"vocab_size": 61, "hidden_size": 32, "intermediate_multiple_size": 2}


def others(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Models that the sweep has not."""
    ids = {"input_ids": torch.arange(3, 36).view(3, 11)}
    draw = torch.Generator().manual_seed(3)
    if name == "gpt2-cross":
        return of("GPT2Config", "GPT2LMHeadModel", **SMALL, add_cross_attention=True), ids | {
            "encoder_hidden_states": torch.randn(3, 5, 24, generator=draw)
        }
    if name == "gpt_neox_japanese":
        return of("GPTNeoXJapaneseConfig", "GPTNeoXJapaneseForCausalLM", **JAPANESE), ids
    if name.startswith("falcon"):
        kind = {"new_decoder_architecture": True, "num_kv_heads": 2} if name == "falcon-new" else {"multi_query": False}
        return build("falcon", padding="none", gain=3.0, **kind)
    if name == "gpt_bigcode-many":
        return build("gpt_bigcode", padding="none", gain=3.0, multi_query=False)
    pixels = {"pixel_values": torch.randn(3, 3, 20, 20, generator=draw)}
    kind = "Blip2" if name == "blip_2" else "Blip"
    return of(f"{kind}VisionConfig", f"{kind}VisionModel", **VISION), pixels


@pytest.mark.parametrize(
    "name", ["gpt2-cross", "gpt_neox_japanese", "falcon-new", "falcon-many", "gpt_bigcode-many", "blip", "blip_2"]
)
def test_models_that_the_sweep_has_not(name: str) -> None:
    model, inputs = others(name)
    torch.manual_seed(11)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.2)
    if "-" in name and name != "gpt2-cross":  # capture sees these, and their own scale is not to be set
        one = calls_of(model, inputs)[0]
        fold_scale(model, FROM, TO)
        other = calls_of(model, inputs)[0]
        assert torch.equal(other.key, one.key)
        torch.testing.assert_close(products(other) * 0.83, products(one) * 6**-0.5, rtol=1e-5, atol=1e-6)
        return
    with torch.no_grad():
        width = next(iter(find_projections(model).values())).head_dim
        before = model(**inputs)[0]
        fold_scale(model, FROM, TO)
        unscaled = model(**inputs)[0]
        if name == "gpt_neox_japanese":
            for layer in model.gpt_neox_japanese.layers:
                layer.attention.norm_factor /= 0.83 * width**0.5
        else:
            engine(model, 0.83 * width**0.5)
        after = model(**inputs)[0]
    scale = float(before.abs().max())
    assert float((unscaled - before).abs().max()) > 1e-3 * scale
    torch.testing.assert_close(after, before, rtol=0, atol=2e-5 * scale)


def test_every_row_is_held() -> None:
    held = {*SEPARATE, *FUSED, *NORMED, *LATENT, *CLIPPED, "bloom", "mpt", "blip", "gpt_neox_japanese"}
    for family in FAMILIES:
        by_hand = "hand-written" in family.models  # below
        assert by_hand or held & set(re.split(r"[ ,]+", family.models)), family.models


class Written(nn.Module):
    """Hand-written attention."""

    def __init__(self, q: str, k: str, v: str) -> None:
        super().__init__()
        self.names = (q, k, v)
        setattr(self, "heads" if q == "to_q" else "num_heads", 3)  # diffusers calls them heads
        for name in self.names:
            self.add_module(name, nn.Linear(7, 15))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.get_submodule(name)(x).unflatten(-1, (3, 5)).transpose(1, 2) for name in self.names)
        return nn.functional.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("names", [("to_q", "to_k", "to_v"), ("wq", "wk", "wv")])
def test_hand_written_modules(names: tuple[str, str, str]) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(Written(*names)).double()
    inputs = torch.randn(2, 11, 7, dtype=torch.float64)
    before = calls_of(model, {"input": inputs})
    fold_scale(model, FROM, TO)
    after = calls_of(model, {"input": inputs})
    torch.testing.assert_close(products(after[0]) * 0.83, products(before[0]) * 5**-0.5, rtol=1e-13, atol=1e-14)


def test_joint_attention_is_refused() -> None:
    model = nn.Sequential(Written("to_q", "to_k", "to_v"))
    model[0].add_q_proj = nn.Linear(7, 15)
    with pytest.raises(UnsupportedError, match="of other tokens by add_q_proj"):
        fold_scale(model, FROM, TO)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"kdim": 11, "vdim": 13},
        {"add_bias_kv": True},
        {"num_kv_heads": 2},
        {"head_dims": 5},
        {"qk_norm": "rms"},
        {"qk_norm": "layer", "num_kv_heads": 2},
        {"qk_norm": "own"},
    ],
)
@pytest.mark.parametrize("on", ["fold", "query", "auto"])
def test_modules_with_torchs_parameters(options: dict[str, Any], on: str) -> None:
    torch.manual_seed(3)
    options = dict(options)
    if options.get("qk_norm") == "own":
        options["qk_norm"] = attemper.nn.QKNorm(6, over="all", num_heads=4, zero_centred=True, bias=True, dtype=torch.float64)
    made = [attemper.nn.MultiheadAttention(24, 4, batch_first=True, dtype=torch.float64, **options)]
    if not {"num_kv_heads", "head_dims", "qk_norm"} & set(options):
        made.append(nn.MultiheadAttention(24, 4, batch_first=True, dtype=torch.float64, **options))
    for module in made:
        for parameter in module.parameters():
            nn.init.uniform_(parameter, -1.0, 1.0)
        query, key, value = (torch.randn(2, 7, width or 24, dtype=torch.float64) for width in (24, module.kdim, module.vdim))
        inputs = {"query": query, "key": key, "value": value, "need_weights": False}
        model = nn.ModuleDict({"attention": module}).eval()
        (before,) = calls_of(model["attention"], inputs)
        expected = torch.full((4,), before.query.shape[-1] ** -0.5 / 0.83, dtype=torch.float64)
        if on == "fold":
            fold_scale(model, FROM, TO)
        else:
            shared = find_projections(model)["attention"].query.count == 1
            maxima = torch.tensor([200.0, 50.0, 400.0, 50.0])
            report = qk_clip_(model, {"attention": maxima}, 100.0, on=on)
            expected = torch.tensor([0.25] * 4 if shared else [0.5, 1.0, 0.25, 1.0], dtype=torch.float64)
            assert report.clips
        (after,) = calls_of(model["attention"], inputs)
        torch.testing.assert_close(products(after), products(before) * expected.view(1, 4, 1, 1), rtol=1e-6, atol=1e-7)
        assert torch.equal(after.value, before.value)


def test_heads_of_several_widths_are_refused() -> None:
    module = attemper.nn.MultiheadAttention(24, 2, head_dims=[5, 7])
    with pytest.raises(UnsupportedError, match=r"attention has heads of widths \[5, 7\]"):
        find_projections(nn.ModuleDict({"attention": module}))


class OddAttention(nn.Module):
    """Children with names of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.ask, self.answer = nn.Linear(7, 15), nn.Linear(7, 15)


def test_unknown_layouts_say_what_to_pass() -> None:
    model = nn.ModuleDict({"odd": OddAttention()})
    expected = r"odd \(OddAttention with answer, ask\) has no row in the table: pass layouts=\{'odd': Projections\(query=Heads"
    with pytest.raises(UnsupportedError, match=expected):
        fold_scale(model, FROM, TO)
    before = model["odd"].ask.weight.detach().clone()
    layout = Projections(Heads(("ask.weight", "ask.bias"), torch.arange(15).view(3, 5)))
    fold_scale(model, scales.Constant(2.0), scales.Constant(1.0), layouts={"odd": layout})
    assert torch.equal(model["odd"].ask.weight, 2 * before)
    with pytest.raises(ArgumentError, match=r"layouts: got 'even'; expected names of modules"):
        fold_scale(model, FROM, TO, layouts={"even": layout})
    model["odd"].ask = nn.Linear(7, 13)
    with pytest.raises(ArgumentError, match=r"features: got output 14 of odd.ask.weight; expected one below 13"):
        fold_scale(model, FROM, TO, layouts={"odd": layout})
    with pytest.raises(ArgumentError, match=r"parameters: got odd.demand.weight; expected the name of a parameter"):
        fold_scale(model, FROM, TO, layouts={"odd": Projections(Heads(("demand.weight",), torch.arange(15).view(3, 5)))})
    with pytest.raises(ArgumentError, match=r"model: got ReLU without any"):
        fold_scale(nn.ReLU(), FROM, TO)


def test_what_is_no_factor_times_the_product_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"attn \(MptAttention\) clamps q and k at clip_qkv=8"):
        find_projections(build("mpt", attn_config={"clip_qkv": 8.0})[0])
    with pytest.raises(UnsupportedError, match=r"k_layernorm \(StableLmLayerNormPerHead\) has no gain"):
        find_projections(build("stablelm", qk_layernorm=True)[0])
    model, _ = build("llama")
    model.model.layers[0].self_attn.q_norm = nn.RMSNorm(10, elementwise_affine=False)
    model.model.layers[0].self_attn.k_norm = nn.RMSNorm(10, elementwise_affine=False)
    with pytest.raises(UnsupportedError, match=r"layers.0.self_attn.\w_norm \(RMSNorm\) has no gain"):
        find_projections(model)
    assert list(find_projections(model, only={"model.layers.1.self_attn"})) == ["model.layers.1.self_attn"]
    with pytest.raises(UnsupportedError, match=r"attention \(DifferentialAttention\): 24 outputs .*, 4 heads of width 3"):
        find_projections(nn.ModuleDict({"attention": attemper.nn.DifferentialAttention(24, 4, layer=1)}))


def test_weights_that_cannot_be_edited() -> None:
    model, _ = build("llama")
    projection = model.model.layers[1].self_attn.q_proj
    projection.weight = nn.Parameter(projection.weight.detach().to(torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedError, match=r"layers.1.self_attn.q_proj.weight is int8: quantised weights cannot be edited"):
        fold_scale(model, FROM, TO)


class Adapted(nn.Linear):
    """A low-rank product beside W·x, as loralib adds it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=False)
        self.weight = base.weight
        self.down, self.up = nn.Parameter(torch.randn(3, base.in_features)), nn.Parameter(torch.randn(base.out_features, 3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.down.T @ self.up.T


class Cast(nn.Linear):
    """The same product in another dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.double(), self.weight.double()).to(x.dtype)


class Linear(nn.Module):
    """A wrapper with the name and the weight of what it wraps, as PEFT's."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.adapter = base, nn.Linear(base.in_features, base.out_features, bias=False)
        self.bias = None

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.adapter(x)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Adapted, r"q_proj \(Adapted\) has parameters besides weight and bias \(down, up\), so it may compute more than W·x"),
        (Linear, r"q_proj \(Linear\) has parameters besides weight and bias \(base_layer.weight, adapter.weight\)"),
    ],
)
def test_projections_with_adapters_are_left_alone(kind: type[Any], reason: str) -> None:
    model, _ = build("llama")
    model.model.layers[1].self_attn.q_proj = kind(model.model.layers[1].self_attn.q_proj)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UnsupportedError, match=reason):
        fold_scale(model, FROM, TO)
    with pytest.raises(UnsupportedError, match=reason):
        qk_clip_(model, {f"model.layers.{layer}.self_attn": torch.full((4,), 200.0) for layer in range(2)})
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_a_forward_that_was_put_over_that_of_the_class_is_left_alone() -> None:
    model, _ = build("llama")
    projection, maxima = model.model.layers[1].self_attn.q_proj, {"model.layers.1.self_attn": torch.full((4,), 200.0)}
    projection.forward = lambda x: nn.Linear.forward(projection, x).tanh()
    with pytest.raises(UnsupportedError, match=r"q_proj \(Linear\) has a forward that was put over that of its class"):
        qk_clip_(model, maxima)
    projection._hf_hook = object()  # accelerate's, which moves the inputs
    assert qk_clip_(model, maxima).clips


def test_a_class_that_computes_the_same_product_is_edited() -> None:
    model, _ = build("llama")
    attention = model.model.layers[1].self_attn
    projection = Cast(attention.q_proj.in_features, attention.q_proj.out_features, bias=False)
    attention.q_proj = projection
    before = projection.weight.detach().clone()
    qk_clip_(model, {"model.layers.1.self_attn": torch.full((4,), 200.0)})
    assert torch.equal(projection.weight, before * 0.5)


def test_asking_for_projections_runs_no_hook() -> None:
    model, _ = build("qwen3")
    calls = []
    for module in model.modules():
        module.register_forward_hook(lambda *_: calls.append(1))
    find_projections(model)
    assert not calls


@pytest.mark.parametrize(("name", "config"), [("Mistral4", {"rope_parameters": _MISTRAL4_ROPE}), ("MiniCPM3", {}), ("Youtu", {})])
def test_latent_attention_of_other_names(name: str, config: dict[str, Any]) -> None:
    model = of(f"{name}Config", f"{name}ForCausalLM", **copy.deepcopy(_MLA | config))  # configs write into what they are given
    inputs = {"input_ids": torch.arange(3, 36).view(3, 11)}
    before = calls_of(model, inputs)[0]
    qk_clip_(model, {"model.layers.0.self_attn": torch.tensor([50.0, 400.0, 50.0, 200.0])})
    after = calls_of(model, inputs)[0]
    factors = torch.tensor([1.0, 0.25, 1.0, 0.5]).view(1, 4, 1, 1)
    torch.testing.assert_close(products(after), products(before) * factors, rtol=1e-5, atol=1e-6)
    assert torch.equal(after.key[..., 6:], before.key[..., 6:])
    assert torch.equal(after.value, before.value)


def test_a_description_is_checked() -> None:
    rows = torch.arange(12).view(4, 3)
    with pytest.raises(ArgumentError, match=r"features: got float32 \[4, 3\]; expected an int64 tensor \[heads, d\]"):
        Heads(("q.weight",), rows.float())
    with pytest.raises(ArgumentError, match=r"features: got \[\[0, 0\]\]; expected every output once"):
        Heads(("q.weight",), torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(ArgumentError, match=r"parameters: got \(\); expected names"):
        Heads((), rows)
    with pytest.raises(ArgumentError, match=r"dim: got 2; expected 0"):
        Heads(("q.weight",), rows, dim=2)
    with pytest.raises(ArgumentError, match=r"key.features: got 3 heads; expected a number that divides the 4 of q"):
        Projections(Heads(("q.weight",), rows), Heads(("k.weight",), rows[:3]))
    with pytest.raises(ArgumentError, match=r"query.features: got 4 heads; expected 8 or, shared by all, 1"):
        Projections(Heads(("q.weight",), rows), heads=8)
    with pytest.raises(ArgumentError, match=r"shared_key: got 3; expected a width from 0 on and below q's 3"):
        Projections(Heads(("q.weight",), rows), shared_key=3)
    both = Projections(Heads(("x.weight",), rows), Heads(("x.weight",), rows))
    model = nn.ModuleDict({"a": nn.ModuleDict({"x": nn.Linear(7, 12)})})
    with pytest.raises(ArgumentError, match=r"features: got outputs of a.x.weight named for q and for k"):
        qk_clip_(model, {"a": torch.full((4,), 400.0)}, layouts={"a": both})
