import math
from types import SimpleNamespace

import pytest

from attemper.checker import scale_rules as rules
from attemper.checker.scale_rules import Design, Factor, Site, rope_parameters, with_rope


def site(head_dim: int = 13, heads: int = 5, layer: int | None = None, **config: object) -> Site:
    return Site(SimpleNamespace(**config), head_dim, heads, layer)


def value(design: Design) -> float:
    assert design.value is not None
    return design.value


@pytest.mark.parametrize(
    ("design", "expected"),
    [
        (rules.inverse_sqrt(site()), 13**-0.5),
        (rules.prescaled(site()), 13**-0.5),
        (rules.both_prescaled(site()), 13**-0.5),
        (rules.folded(site()), 1.0),
        (rules.one(site()), 1.0),
        (rules.inverse_with_log_positions(site()), 1 / 13),
        (rules.query_pre_attn_scalar(site(query_pre_attn_scalar=17)), 17**-0.5),
        (rules.query_pre_attn_scalar(site(query_pre_attn_scalar=None)), 13**-0.5),
        (rules.attention_multiplier(site(attention_multiplier=1)), 1.0),
        (rules.attention_multiplier(site(attention_multiplier=0.0078125)), 0.0078125),
        (rules.attention_multiplier(site(attention_multiplier=None)), 13**-0.5),
        (rules.half_width(site()), 6.5**-0.5),
        (rules.deberta(site(pos_att_type=None)), 13**-0.5),
        (rules.deberta(site(pos_att_type=["c2p", "p2c"])), 39**-0.5),
        (rules.mpt(site(attn_config=SimpleNamespace(softmax_scale=0.2))), 0.2),
        (rules.mpt(site(attn_config=SimpleNamespace(softmax_scale=None))), 13**-0.5),
        (rules.padded(site(head_dim=16, hidden_size=65, num_attention_heads=5)), 13**-0.5),
        (rules.model_width(site()), 65**-0.5),
        (rules.inverse_sqrt_heads(site()), 5**-0.5),
        (rules.sqrt_behind_norm(site()), 13**0.5),
        (rules.qk_scale_factor(site(qk_scale_factor=3.87)), 3.87 * 13**-0.5),
    ],
)
def test_a_rule_is_its_formula(design: Design, expected: float) -> None:
    assert value(design) == pytest.approx(expected, rel=1e-12)


def test_a_learned_scale_has_no_value() -> None:
    assert rules.learned(site()).value is None


def test_prescaling_rules_say_what_q_and_k_carry() -> None:
    assert rules.prescaled(site()).query == pytest.approx(13**-0.5)
    assert rules.both_prescaled(site()).key == pytest.approx(13**-0.25)


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("by_layer", [True, False])
def test_gpt2_reads_both_flags(weights: bool, by_layer: bool) -> None:
    design = rules.gpt2(site(layer=3, scale_attn_weights=weights, scale_attn_by_inverse_layer_idx=by_layer))
    assert value(design) == pytest.approx((13**-0.5 if weights else 1.0) / (4 if by_layer else 1))


def test_gpt2_expects_nothing_where_the_layer_is_unknown_and_matters() -> None:
    assert rules.gpt2(site(scale_attn_by_inverse_layer_idx=True)).value is None
    assert rules.gpt2(site()).value == pytest.approx(13**-0.5)


YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 16}


def test_mscale_goes_in_squared() -> None:
    design = rules.multi_latent(site(rope_parameters=YARN | {"mscale_all_dim": 0.7}))
    mscale = 0.1 * 0.7 * math.log(40.0) + 1
    assert design.factors == (Factor("mscale^2", pytest.approx(mscale**2), root="mscale"),)
    assert value(design) == pytest.approx(13**-0.5 * mscale**2)


@pytest.mark.parametrize(
    "rope", [{}, YARN, YARN | {"mscale_all_dim": 1.0, "factor": 1.0}, {"rope_type": "default", "mscale_all_dim": 1.0}]
)
def test_no_mscale_without_a_stretch_and_its_own_setting(rope: dict[str, object]) -> None:
    assert value(rules.multi_latent(site(rope_parameters=rope))) == pytest.approx(13**-0.5)


def test_longcat_lifts_q_behind_its_projection() -> None:
    design = rules.multi_latent_scaled_latents(site(hidden_size=28, q_lora_rank=7))
    assert (value(design), design.query) == (pytest.approx(13**-0.5 * 2), 2.0)


def test_yarn_scales_q_and_k_each() -> None:
    factor = 0.1 * math.log(40.0) + 1
    design = with_rope(rules.inverse_sqrt(site()), site(rope_parameters=YARN))
    assert value(design) == pytest.approx(13**-0.5 * factor**2)
    assert (design.query, design.key) == (pytest.approx(factor), pytest.approx(factor))


@pytest.mark.parametrize(
    ("rope", "factor"),
    [
        (YARN | {"attention_factor": 1.25}, 1.25),
        (YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}, (0.1 * math.log(40.0) + 1) / (0.05 * math.log(40.0) + 1)),
        ({"rope_type": "longrope", "original_max_position_embeddings": 16}, math.sqrt(1 + math.log(4) / math.log(16))),
        ({"type": "yarn", "factor": 40.0}, 0.1 * math.log(40.0) + 1),
        ({"rope_type": "linear", "factor": 40.0}, 1.0),
        ({"rope_type": "longrope", "factor": 4.0, "short_mscale": 1.2, "original_max_position_embeddings": 16}, 1.0),
        (YARN | {"partial_rotary_factor": 0.5}, 1.0),
    ],
)
def test_the_factor_of_a_stretched_rope(rope: dict[str, object], factor: float) -> None:
    design = with_rope(rules.inverse_sqrt(site()), site(rope_parameters=rope, max_position_embeddings=64))
    assert value(design) == pytest.approx(13**-0.5 * factor**2)


def test_a_layer_without_rope_has_no_such_factor() -> None:
    assert value(with_rope(rules.inverse_sqrt(site()), site(layer=1, rope_parameters=YARN, no_rope_layers=[1, 0]))) == 13**-0.5
    assert value(with_rope(rules.inverse_sqrt(site()), site(layer=0, rope_parameters=YARN, no_rope_layers=[1, 0]))) > 13**-0.5


def test_rope_settings_may_differ_by_layer_type() -> None:
    config = SimpleNamespace(rope_parameters={"a": YARN, "b": {"rope_type": "linear"}}, layer_types=["b", "a"])
    assert [rope_parameters(config, layer)["rope_type"] for layer in (0, 1)] == ["linear", "yarn"]


def test_the_transformers_library_computes_the_same_rope_factor() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    longrope = {
        "rope_type": "longrope",
        "long_factor": [1.0] * 5,
        "short_factor": [1.0] * 5,
        "original_max_position_embeddings": 16,
    }
    for rope in (YARN, YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}, YARN | {"attention_factor": 1.25}, longrope):
        config = transformers.LlamaConfig(
            hidden_size=20, num_attention_heads=2, max_position_embeddings=64, rope_parameters=rope | {"rope_theta": 1e4}
        )
        _, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
        design = with_rope(rules.inverse_sqrt(Site(config, 10)), Site(config, 10))
        assert value(design) == pytest.approx(10**-0.5 * factor**2, rel=1e-9)
