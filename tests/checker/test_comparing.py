"""Differences put into models on purpose: each is named with its layer, its heads, its factor and its cause."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attemper.checker import Comparison, compare
from attemper.checker.comparing import Parting
from attemper.errors import ArgumentError, LoadError
from tests.capture.architectures import BATCH, HEADS, PADDED_ROW, PADDING, TOKENS, build
from tests.checker import comparing_cases as cases
from tests.checker.comparing_cases import Cached, Small, faulty, registered

GAIN = 3.0  # logits away from zero


def parted(comparison: Comparison, module: str | None = None) -> Parting:
    parting = comparison.parting
    assert parting is not None, str(comparison)
    assert comparison.exit_code() == 1
    if module is not None:
        assert comparison.rows[parting.row].a == module
    return parting


def twice(name: str, **settings: Any) -> tuple[nn.Module, nn.Module, dict[str, Tensor]]:
    """A tiny model, a copy of it, and inputs."""
    settings = {"padding": "none", "gain": GAIN} | settings
    model, inputs = build(name, **settings)
    return model, copy.deepcopy(model), inputs


def change(weight: Tensor, rows: slice = slice(None), size: float = 0.05) -> None:
    with torch.no_grad():
        weight[rows] += size * weight.std() * torch.randn(weight[rows].shape, generator=torch.Generator().manual_seed(2))


class TestScale:
    def test_a_backend_ignores_the_factor_by_layer(self) -> None:
        model, other, inputs = twice("gpt2", scale_attn_by_inverse_layer_idx=True)
        with registered("ignores", faulty(scale=lambda _scale, width: width**-0.5)):
            found = compare(model, other, inputs, attn=("eager", "ignores"))
        parting = parted(found, "transformer.h.1.attn")
        assert parting.cause == "scale"
        assert parting.factor == pytest.approx(2.0, rel=1e-3)
        assert parting.heads == tuple(range(HEADS))
        assert "B's implementation is at fault: it does not apply the scale that it is given" in parting.explanation
        assert "the factor" in parting.explanation
        assert "is missing" in parting.explanation
        assert found.rows[0].parts == ()

    def test_opt_scaled_twice(self) -> None:
        model, other, inputs = twice("opt")
        width = model.config.hidden_size // HEADS
        with registered("again", faulty(scale=lambda scale, width: scale * width**-0.5)):
            parting = parted(compare(model, other, inputs, attn=("sdpa", "again")), "model.decoder.layers.0.self_attn")
        assert (parting.cause, parting.heads) == ("scale", tuple(range(HEADS)))
        assert parting.factor == pytest.approx(width**-0.5, rel=1e-3)
        assert "the scale is applied twice" in parting.explanation

    def test_a_scale_that_q_carries(self) -> None:
        model, other, inputs = twice("opt")
        width = model.config.hidden_size // HEADS
        for layer in other.model.decoder.layers:
            layer.self_attn.scaling = 1 / width
        parting = parted(compare(model, other, inputs), "model.decoder.layers.0.self_attn")
        assert parting.factor == pytest.approx(width**-0.5, rel=1e-3)
        assert "q or k carries it" in parting.explanation

    def test_mscale_missing(self) -> None:
        model, other, inputs = twice("deepseek_v3")
        width = other.config.qk_nope_head_dim + other.config.qk_rope_head_dim
        for layer in other.model.layers:
            layer.self_attn.scaling = width**-0.5
        parting = parted(compare(model, other, inputs), "model.layers.0.self_attn")
        assert parting.cause == "scale"
        assert parting.factor == pytest.approx(cases.yarn_mscale(40.0) ** -2, rel=1e-3)
        assert "B's scale: the factor mscale" in parting.explanation
        assert "missing" in parting.explanation

    def test_rounded_to_16_bits(self) -> None:
        model, other, inputs = twice("llama")
        own = model.model.layers[1].self_attn.scaling
        rounded = torch.tensor(own, dtype=torch.bfloat16).item()
        other.model.layers[1].self_attn.scaling = rounded
        parting = parted(compare(model, other, inputs), "model.layers.1.self_attn")
        assert parting.factor == pytest.approx(rounded / own, rel=1e-7)
        assert "rounded to bfloat16" in parting.explanation

    def test_a_factor_next_to_one(self) -> None:
        found = compare(Small(), Small(1, scale=cases.WIDTH**-0.5 * 1.0001))
        parting = parted(found, "layers.1")
        assert parting.factor == pytest.approx(1.0001, rel=1e-7)
        assert found.rows[1].inherited == 0

    def test_other_weights_and_another_scale(self) -> None:
        model, other = Small(), Small(1, scale=1.0)
        for layer in other.layers:
            change(layer.q.weight, size=0.5)
        parting = parted(compare(model, other), "layers.0")
        assert parting.cause == "weights"
        change(model.layers[1].q.weight, size=0.5)
        for one, two in zip(model.layers[0].parameters(), other.layers[0].parameters(), strict=True):
            one.data.copy_(two.data)
        model.layers[1].k.weight.data.copy_(model.layers[1].k.weight.roll(1, 0))
        parting = parted(compare(model, other), "layers.1")
        assert parting.cause == "scale"
        assert parting.factor == pytest.approx(cases.WIDTH**0.5, rel=1e-6)
        assert any("k differs already" in words for words in parting.also)

    def test_one_head(self) -> None:
        parting = parted(compare(Small(), _scaled_head(Small(), layer=2, head=3, factor=1.5)), "layers.2")
        assert (parting.cause, parting.heads) == ("scale", (3,))
        assert parting.factor == pytest.approx(1.5, rel=1e-3)
        assert parting.parameters == ("layers.2.q.weight",)

    def test_a_part_of_the_width(self) -> None:
        parting = parted(compare(Small(), Small(1, part=1.3)), "layers.1")
        assert parting.cause == "scale"
        assert parting.factor == pytest.approx(1.3, rel=1e-3)
        assert "in dimensions 4 to 5 of 6 alone" in parting.explanation

    def test_a_factor_by_position_shows_as_a_curve(self) -> None:
        model, other, inputs = twice("llama4")
        for layer in other.model.layers:
            layer.self_attn.attn_temperature_tuning = False
        found = compare(model, other, inputs)
        parting = parted(found)
        position = torch.arange(TOKENS)
        expected = 1 / (1 + 0.3 * torch.log1p(((position + 1) / 4).floor()))
        assert parting.cause == "scale"
        assert parting.factor is None
        assert parting.curve == pytest.approx(expected.tolist(), rel=1e-3)
        assert "depends on the position" in parting.explanation

    def test_a_factor_that_moved_from_the_call_into_q_is_no_difference(self) -> None:
        model = Small()
        other = Small(1, scale=1.0)
        with torch.no_grad():
            other.layers[1].q.weight *= cases.WIDTH**-0.5
        assert compare(model, other).parting is None


class TestMask:
    def test_the_mask_function_is_missing_with_left_padding(self) -> None:
        model, other, inputs = twice("llama", padding="left")
        with registered("maskless", faulty(), mask=False):
            parting = parted(compare(model, other, inputs, attn=("eager", "maskless")), "model.layers.0.self_attn")
        assert parting.cause == "mask"
        assert "it is given no mask and applies no causal rule itself" in parting.explanation
        real, keys = TOKENS - PADDING, PADDING
        assert f"{HEADS * real * keys} pairs with padded keys" in parting.explanation
        future = HEADS * ((BATCH - 1) * TOKENS * (TOKENS - 1) // 2 + real * (real - 1) // 2)
        assert f"{future} pairs with keys behind the query's own position are visible to B alone" in parting.explanation
        assert PADDED_ROW == 1

    def test_causal_alignment(self) -> None:
        parting = parted(compare(Cached(True), Cached(False)), "")
        assert parting.cause == "mask"
        assert "top-left in B (key ≤ query) and bottom-right in A (key ≤ query + 6)" in parting.explanation
        back = parted(compare(Cached(False), Cached(True)))
        assert "top-left in A (key ≤ query) and bottom-right in B (key ≤ query + 6)" in back.explanation

    def test_a_window_that_one_forgot(self) -> None:
        model, other, inputs = twice("mistral")
        other.config.sliding_window = None
        parting = parted(compare(model, other, inputs), "model.layers.0.self_attn")
        assert parting.cause == "mask"
        assert "a window of 3 keys" in parting.explanation

    def test_padded_queries_do_not_count(self) -> None:
        model, other, inputs = twice("llama", padding="left")
        assert compare(model, other, inputs, attn=("eager", "sdpa")).parting is None


class TestOtherRules:
    def test_softcap_dropped_by_the_model(self) -> None:
        model, other, inputs = twice("gemma2", gain=8.0)
        other.model.layers[1].self_attn.attn_logit_softcapping = None
        parting = parted(compare(model, other, inputs), "model.layers.1.self_attn")
        assert parting.cause == "softcap"
        assert "A caps its logits at 5, B does not cap them" in parting.explanation

    def test_softcap_dropped_by_the_backend(self) -> None:
        model, other, inputs = twice("gemma2", gain=8.0)
        with registered("uncapped", faulty(softcap=False)):
            parting = parted(compare(model, other, inputs, attn=("eager", "uncapped")), "model.layers.0.self_attn")
        assert parting.cause == "softcap"
        assert "B's implementation is at fault: it ignores its softcap of 5" in parting.explanation

    def test_sinks_dropped(self) -> None:
        model, other, inputs = twice("gpt_oss")
        with registered("sinkless", faulty(sinks=False)):
            parting = parted(compare(model, other, inputs, attn=("eager", "sinkless")), "model.layers.0.self_attn")
        assert parting.cause == "sinks"
        assert "only A has sinks" in parting.explanation
        with registered("sound", faulty()):
            assert compare(model, other, inputs, attn=("eager", "sound")).parting is None

    def test_a_bias(self) -> None:
        model, other, inputs = twice("t5")
        with torch.no_grad():
            other.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight *= 1.25
        parting = parted(compare(model, other, inputs), "encoder.block.0.layer.0.SelfAttention")
        assert parting.cause == "bias"
        assert "B's is 1.25 times A's" in parting.explanation

    def test_key_heads_mapped_otherwise_by_the_backend(self) -> None:
        model, other, inputs = twice("llama")
        with registered("mixed", faulty(grouped="repeat")):
            parting = parted(compare(model, other, inputs, attn=("eager", "mixed")), "model.layers.0.self_attn")
        assert parting.cause == "heads"
        assert parting.heads == (1, 2)
        assert "in the order 0 1 0 1, not 0 0 1 1" in parting.explanation

    def test_key_heads_mapped_otherwise_by_the_model(self) -> None:
        parting = parted(compare(Small(), Small(1, grouped="repeat")), "layers.1")
        assert (parting.cause, parting.heads) == ("heads", (1, 2))
        assert "head h of B uses the keys of A's head [0, 2, 0, 2][h]" in parting.explanation

    def test_heads_in_another_order(self) -> None:
        parting = parted(compare(Small(), Small(0, order=[2, 1, 3, 0])), "layers.0")
        assert (parting.cause, parting.heads) == ("heads", (0, 2, 3))
        assert "head h of B is A's head [2, 1, 3, 0][h]" in parting.explanation


class TestPosition:
    def test_another_base_in_one_layer(self) -> None:
        found = compare(Small(), Small(2, base=500.0))
        parting = parted(found, "layers.2")
        assert parting.cause == "position"
        assert "the rotary base (rope_theta) is 10000 in A and 500 in B" in parting.explanation
        assert [row.parts for row in found.rows[:2]] == [(), ()]

    def test_another_base_in_a_model_of_transformers(self) -> None:
        model, inputs = build("llama", padding="none", gain=GAIN)
        other, _ = build("llama", padding="none", gain=GAIN, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
        parting = parted(compare(model, other, inputs), "model.layers.0.self_attn")
        assert "the rotary base (rope_theta) is 10000 in A and 500000 in B" in parting.explanation

    @pytest.mark.parametrize("pairings", [("half-split", "interleaved"), ("interleaved", "half-split")])
    def test_another_pairing(self, pairings: tuple[str, str]) -> None:
        parting = parted(compare(Small(0, pairing=pairings[0]), Small(0, pairing=pairings[1])), "layers.0")
        assert parting.cause == "position"
        assert f"rotary pairs are {pairings[0]} in A and {pairings[1]} in B" in parting.explanation

    def test_a_conversion_between_pairings_done_right_is_no_difference(self) -> None:
        model, other = Small(1, pairing="interleaved"), Small()
        order = torch.tensor([0, 2, 4, 1, 3, 5])  # 2i and 2i + 1 become i and i + 3
        for name in ("q", "k"):
            weight = getattr(other.layers[1], name).weight.data
            weight.copy_(weight.unflatten(0, (-1, cases.WIDTH))[:, order].flatten(0, 1))
        found = compare(model, other)
        assert found.parting is None
        assert found.rows[1].logits < found.rows[1].allowed

    def test_shifted_queries(self) -> None:
        parting = parted(compare(Small(), Small(1, shift=2)), "layers.1")
        assert parting.cause == "position"
        assert "positions are shifted" in parting.explanation

    def test_a_shift_of_queries_and_keys_alike_is_no_difference(self) -> None:
        model, other, inputs = twice("llama")
        other.model.register_forward_pre_hook(_shift_positions, with_kwargs=True)
        found = compare(model, other, inputs)
        assert found.parting is None
        assert max(row.inherited for row in found.rows) > 0


class TestWeights:
    def test_one_head_of_one_layer(self) -> None:
        model, other, inputs = twice("llama")
        width = model.config.head_dim
        change(other.model.layers[1].self_attn.q_proj.weight, slice(2 * width, 3 * width))
        parting = parted(compare(model, other, inputs), "model.layers.1.self_attn")
        assert (parting.cause, parting.heads) == ("weights", (2,))
        assert parting.parameters == ("model.layers.1.self_attn.q_proj.weight",)
        assert "q differs already" in parting.explanation

    def test_values(self) -> None:
        model, other, inputs = twice("llama")
        width = model.config.head_dim
        change(other.model.layers[0].self_attn.v_proj.weight, slice(0, width))
        parting = parted(compare(model, other, inputs), "model.layers.0.self_attn")
        assert (parting.cause, parting.heads) == ("values", (0, 1))  # two query heads share the first of the values
        assert parting.parameters == ("model.layers.0.self_attn.v_proj.weight",)

    def test_outside_attention(self) -> None:
        model, other, inputs = twice("llama")
        change(other.model.layers[0].mlp.down_proj.weight)
        found = compare(model, other, inputs)
        parting = parted(found, "model.layers.1.self_attn")
        assert parting.cause == "weights"
        assert parting.parameters == ("model.layers.0.mlp.down_proj.weight",)
        assert found.rows[1].own == 0
        assert found.rows[1].inherited > found.rows[1].allowed

    def test_outside_attention_with_equal_weights(self) -> None:
        model, other, inputs = twice("llama")
        other.model.layers[0].mlp.act_fn = nn.GELU()
        parting = parted(compare(model, other, inputs), "model.layers.1.self_attn")
        assert parting.cause == "inputs"
        assert "all parameters are equal" in parting.explanation


class TestOverflow:
    def test_products_beyond_float16(self) -> None:
        model, other, inputs = twice("llama")
        for each in (model, other.half()):
            with torch.no_grad():
                each.model.layers[1].self_attn.q_proj.weight *= 400
                each.model.layers[1].self_attn.k_proj.weight *= 400
        parting = parted(compare(model, other, inputs, attn=("eager", "eager")), "model.layers.1.self_attn")
        assert parting.cause == "nonfinite"
        assert "is beyond float16's 65504" in parting.explanation

    def test_q_that_is_no_number(self) -> None:
        model, other, inputs = twice("llama")
        with torch.no_grad():
            other.model.layers[1].self_attn.q_proj.weight[0, 0] = torch.nan
        parting = parted(compare(model, other, inputs), "model.layers.1.self_attn")
        assert parting.cause == "nonfinite"
        assert parting.heads == (0,)
        assert parting.parameters == ("model.layers.1.self_attn.q_proj.weight",)


class TestSequences:
    def test_a_layer_less(self) -> None:
        model, other, inputs = twice("llama")
        del other.model.layers[1]
        other.config.num_hidden_layers = 1
        for found, names in ((compare(model, other, inputs), "AB"), (compare(other, model, inputs), "BA")):
            parting = parted(found)
            assert parting.cause == "sequence"
            assert parting.explanation == f"{names[0]} makes a call in model.layers.1.self_attn that {names[1]} does not make"
            assert len(found.rows) == 1

    def test_other_shapes(self) -> None:
        model, inputs = build("llama", padding="none")
        other, _ = build("llama", padding="none", num_attention_heads=2)
        parting = parted(compare(model, other, inputs))
        assert parting.cause == "sequence"
        assert "is (3, 4, 11, 11) in A and (3, 2, 11, 11) in B" in parting.explanation

    def test_other_widths_are_said_in_words(self) -> None:
        model, inputs = build("llama", padding="none")
        other, _ = build("llama", padding="none", head_dim=12)
        found = compare(model, other, inputs)
        parting = parted(found)
        assert parting.cause == "widths"
        assert parting.explanation.startswith("a head has 10 numbers in q and k and 10 in v in A, 12 and 12 in B, so that")
        assert any("B multiplies q·k by 0.912871 times" in words for words in parting.also)
        assert (found.rows[0].widths, found.rows[0].value_widths, found.rows[0].output) == ((10, 12), (10, 12), None)
        assert "  widths 10, 12  <-" in str(found)
        assert "inf" not in str(found)

    def test_other_names_are_paired_by_order(self) -> None:
        found = compare(cases.small(), cases.ported())
        parting = parted(found, "layers.1")
        assert parting.factor == pytest.approx(cases.WIDTH**-0.5, rel=1e-3)
        assert "applied a second time" in parting.explanation or "twice" in parting.explanation

    def test_nothing_to_compare(self) -> None:
        found = compare(nn.Linear(3, 3), nn.Linear(3, 3), torch.zeros(1, 3))
        assert found.exit_code() == 3
        assert "no attention call was seen" in str(found)


class TestRounding:
    @pytest.mark.parametrize(
        "name", ["llama", "gpt2", "opt", "bert", "qwen3", "gemma3", "mixtral", "deepseek_v3", "t5", "whisper", "vit"]
    )
    def test_eager_and_sdpa(self, name: str) -> None:
        model, other, inputs = twice(name, padding="left")
        found = compare(model, other, inputs, attn=("eager", "sdpa"))
        assert found.exit_code() == 0, str(found)
        assert all(row.share < 1 for row in found.rows)
        assert not found.equal

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "gemma2", "t5"])
    def test_16_bits(self, name: str, dtype: torch.dtype) -> None:
        model, other, inputs = twice(name)
        for one, two in ((model, other.to(dtype)), (other, model)):
            found = compare(one, two, inputs)
            assert found.exit_code() == 0, str(found)
            assert 1e-4 < max(row.share for row in found.rows) < 1

    def test_a_fault_is_found_beside_16_bits(self) -> None:
        model, other, inputs = twice("llama")
        other.bfloat16().model.layers[1].self_attn.scaling *= 2
        parting = parted(compare(model, other, inputs), "model.layers.1.self_attn")
        assert parting.cause == "scale"
        assert parting.factor == pytest.approx(2.0, rel=1e-2)

    def test_two_equal_folders_do_not_differ_at_all(self, llama_folder: Path) -> None:
        found = compare(str(llama_folder), str(llama_folder))
        assert found.equal
        assert found.exit_code() == 0
        assert all(row.logits == row.own == row.inherited == row.output == 0 for row in found.rows)
        assert "no difference at all" in str(found)

    def test_the_models_are_left_as_they_were(self) -> None:
        model, other, inputs = twice("llama")
        model.train()
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        compare(model, other, inputs)
        assert model.training
        assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class TestAsking:
    def test_one_model_needs_two_ways(self) -> None:
        with pytest.raises(ArgumentError, match="b: got None; expected a second model"):
            compare(Small())
        with pytest.raises(ArgumentError, match="attn: got 'sdpa'"):
            compare(Small(), attn="sdpa")

    def test_an_implementation_that_is_not_there(self) -> None:
        model, _, inputs = twice("llama")
        with pytest.raises(LoadError, match="does not take 'imagined'"):
            compare(model, inputs=inputs, attn=("eager", "imagined"))
        with pytest.raises(LoadError, match="'org/code' names code on the Hub"):
            compare(model, inputs=inputs, attn=("eager", "org/code"))
        with pytest.raises(LoadError, match="Small has no implementations"):
            compare(Small(), attn=("eager", "sdpa"))

    def test_two_implementations_of_one_module(self) -> None:
        model, _, inputs = twice("llama")
        assert compare(model, inputs=inputs, attn=("eager", "sdpa")).exit_code() == 0
        assert model.config._attn_implementation == "eager"

    def test_two_dtypes_of_a_folder(self, llama_folder: Path) -> None:
        found = compare(llama_folder, dtypes=("float32", "bfloat16"))
        assert found.dtypes == ("float32", "bfloat16")
        assert found.exit_code() == 0

    def test_inputs_for_b_alone(self) -> None:
        class Renamed(Small):
            def forward(self, numbers: Tensor) -> Tensor:
                return super().forward(numbers)

        given = Small().example_inputs()
        with pytest.raises(LoadError, match="takes no 'x'"):
            compare(Small(), Renamed(), given)
        assert compare(Small(), Renamed(), given, inputs_b={"numbers": given["x"]}).equal


def _scaled_head(model: nn.Module, layer: int, head: int, factor: float) -> nn.Module:
    with torch.no_grad():
        model.layers[layer].q.weight[head * cases.WIDTH : (head + 1) * cases.WIDTH] *= factor
    return model


def _shift_positions(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, kwargs | {"position_ids": torch.arange(3, 3 + TOKENS).unsqueeze(0)}
