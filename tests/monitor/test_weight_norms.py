"""Norms of projections: of every layout, as the outputs that make q, k and v have them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.utils import parametrizations, prune

import attemper
from attemper.monitor.weight_norms import ProjectionNorms
from attemper.weights import find_projections, spectral_reparam
from tests.capture.architectures import ARCHITECTURES, build

pytest.importorskip("transformers")


def norms_of(model: nn.Module, *names: str) -> dict[str, Tensor | None]:
    return ProjectionNorms(model, names).measure()


def fused_qkv(weight: Tensor, heads: int) -> list[Tensor]:
    """By head: q, k, v."""
    return list(weight.view(heads, 3, -1, weight.shape[-1]).unbind(1))


def expected(parts: list[Tensor]) -> list[float]:
    return [float(part.detach().double().norm()) for part in parts]


# How each of some architectures holds q, k and v, written out here by hand.
LAYOUTS = {
    "llama": ("self_attn", lambda m, c: [m.q_proj.weight, m.k_proj.weight, m.v_proj.weight]),
    "bert": ("attention.self", lambda m, c: [m.query.weight, m.key.weight, m.value.weight]),
    "gpt2": ("attn", lambda m, c: list(m.c_attn.weight.chunk(3, 1))),
    "gpt_neox": ("attention", lambda m, c: fused_qkv(m.query_key_value.weight, c.num_attention_heads)),
    "phi3": (
        "self_attn",
        lambda m, c: list(
            m.qkv_proj.weight.split([each * m.head_dim for each in (c.num_attention_heads, *[c.num_key_value_heads] * 2)])
        ),
    ),
    "deepseek_v3": (
        "self_attn",
        lambda m, c: [
            (m.q_b_proj if m.q_lora_rank else m.q_proj).weight,
            *m.kv_b_proj.weight.view(c.num_attention_heads, -1, m.kv_b_proj.weight.shape[-1]).split(
                [c.qk_nope_head_dim, c.v_head_dim], 1
            ),
        ],
    ),
}


@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout(name: str) -> None:
    model, _ = build(name)
    suffix, parts = LAYOUTS[name]
    places = [place for place, _ in model.named_modules() if place.endswith(f".{suffix}")]
    assert places
    found = norms_of(model, *places)
    for place in places:
        wanted = expected(parts(model.get_submodule(place), model.config))
        torch.testing.assert_close(found[place], torch.tensor(wanted), rtol=1e-5, atol=0)
        assert len(set(wanted)) == 3
    with torch.device("meta"):  # a default device has no say
        again = norms_of(model, *places)
    assert all(torch.equal(again[place], found[place]) for place in places)  # pyrefly: ignore


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["qwen3", "swinv2", "deberta_v2"])
def test_what_is_behind_norms_or_not_known_has_none(name: str) -> None:
    model, _ = build(name)
    names = [place for place, module in model.named_modules() if "Attention" in type(module).__name__]
    assert names
    assert set(norms_of(model, *names).values()) == {None}


@pytest.mark.parametrize("make", [nn.MultiheadAttention, attemper.nn.MultiheadAttention])
def test_multihead(make: Any) -> None:
    model = nn.ModuleDict({"a": make(12, 3)})
    torch.testing.assert_close(norms_of(model, "a")["a"], torch.tensor(expected(list(model["a"].in_proj_weight.chunk(3)))))


def test_multihead_with_widths_of_its_own() -> None:
    attention = nn.MultiheadAttention(12, 3, bias=False, kdim=5, vdim=7)
    model = nn.ModuleDict({"a": attention})
    wanted = expected([attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight])
    torch.testing.assert_close(norms_of(model, "a")["a"], torch.tensor(wanted))


def test_it_follows_the_parameters_and_copies_none() -> None:
    model = nn.ModuleDict({"a": nn.MultiheadAttention(12, 3)})
    norms = ProjectionNorms(model, ["a", "nowhere"])
    before = norms.measure()
    assert before["nowhere"] is None
    with torch.no_grad():
        model["a"].in_proj_weight[:12] *= 3.0
    torch.testing.assert_close(norms.measure()["a"], before["a"] * torch.tensor([3.0, 1.0, 1.0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_are_summed_in_float32(dtype: torch.dtype) -> None:
    model = nn.ModuleDict({"a": nn.MultiheadAttention(120, 3)}).to(dtype)
    found = norms_of(model, "a")["a"]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.tensor(expected(list(model["a"].in_proj_weight.chunk(3)))), rtol=1e-5, atol=0)


def projection(model: nn.Module, name: str) -> Any:
    """Of the queries, or of queries, keys and values."""
    attention = model.get_submodule(name)
    return attention.c_attn if hasattr(attention, "c_attn") else attention.q_proj


def put(model: nn.Module, name: str, weight: Tensor) -> None:
    projection(model, name).weight = nn.Parameter(weight, requires_grad=False)


def remove(model: nn.Module, name: str) -> None:
    parent, _, child = name.rpartition(".")
    delattr(model.get_submodule(parent), child)


CHANGES = {
    "weight norm": lambda model, name: parametrizations.weight_norm(projection(model, name)),
    "weight norm by hooks": lambda model, name: nn.utils.weight_norm(projection(model, name)),
    "pruned": lambda model, name: prune.l1_unstructured(projection(model, name), "weight", 0.5),
    "smaller": lambda model, name: put(model, name, torch.ones(4, 4)),
    "flat": lambda model, name: put(model, name, torch.ones(0)),
    "int8": lambda model, name: put(model, name, projection(model, name).weight.to(torch.int8)),
    "float8": lambda model, name: put(model, name, projection(model, name).weight.to(torch.float8_e4m3fn)),
    "meta": lambda model, name: projection(model, name).to("meta"),
    "gone": remove,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_projection_that_is_no_longer_what_it_was_has_none(name: str, change: str) -> None:
    """And ends no run, whether it changed before or after the first measurement."""
    model, _ = build(name)
    first, second = [place for place, _ in model.named_modules() if place.endswith((".attn", ".self_attn"))][:2]
    norms = ProjectionNorms(model, [first, second])
    before = norms.measure()
    assert before[first] is not None
    CHANGES[change](model, first)
    for after in (norms.measure(), norms_of(model, first, second)):
        assert after[first] is None
        assert torch.equal(after[second], before[second])  # pyrefly: ignore


@pytest.mark.filterwarnings("ignore")
def test_a_run_under_sigma_reparam_goes_on() -> None:
    model, inputs = build("llama")
    spectral_reparam(model)
    with attemper.watch(model.train()) as watching:
        model(**inputs)
        record = watching.step()
    assert record is not None
    assert [layer.norms for layer in record.layers] == [None] * len(record.layers)
    assert record.layers


@pytest.mark.parametrize("dim", [0, 1])
def test_the_norm_of_a_sharded_matrix_is_that_of_the_whole(dim: int) -> None:
    model = nn.ModuleDict({"a": nn.MultiheadAttention(12, 3)})
    wanted = norms_of(model, "a")["a"]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        sharded = distribute_tensor(model["a"].in_proj_weight.detach(), mesh, [Shard(dim)])
        model["a"].in_proj_weight = nn.Parameter(sharded)
        found = norms_of(model, "a")["a"]
        assert type(found) is Tensor
        torch.testing.assert_close(found, wanted)
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_every_module_that_has_projections_apart_from_norms_has_norms() -> None:
    without = set()
    for name in ("llama", "gpt2", "bert", "t5", "falcon", "gpt_bigcode", "bloom", "vit", "whisper"):
        if name not in ARCHITECTURES:
            continue
        model, _ = build(name)
        found = norms_of(model, *find_projections(model))
        without |= {(name, place) for place, value in found.items() if value is None}
    assert not without
