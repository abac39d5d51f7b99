import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from attemper.checker import scale_rules as rules
from attemper.checker.scale_rules import Site, setting, with_rope
from attemper.checker.scales_expected import expected_scale, modules_around


class Block(nn.Module):
    def __init__(self, config: Any = None) -> None:
        super().__init__()
        if config is not None:
            self.config = config
        self.inner = nn.MultiheadAttention(15, 3)
        self.layers = nn.ModuleList([nn.Linear(2, 3), nn.Linear(2, 3)])


def config(model_type: str, **fields: Any) -> SimpleNamespace:
    return SimpleNamespace(model_type=model_type, **fields)


def test_torchs_own_attention_keeps_its_rule_inside_any_model() -> None:
    model = Block(config("gemma4_text"))
    assert expected_scale(model, "inner", head_dim=5).value == pytest.approx(5**-0.5)
    assert expected_scale(model, "layers.0", head_dim=5).value == 1.0


def test_the_nearest_config_decides() -> None:
    model = nn.ModuleDict({"vision": Block(config("siglip_vision_model")), "text": Block(config("t5"))})
    model.config = config("gemma4")
    assert expected_scale(model, "vision.layers.0", head_dim=7).rule == "1/sqrt(d_head)"
    assert expected_scale(model, "text.layers.1", head_dim=7).architecture == "t5"
    assert expected_scale(model, "", head_dim=7).architecture == "gemma4"


def test_a_config_given_from_outside_is_the_last_resort() -> None:
    assert expected_scale(Block(), "layers.0", config("granite", attention_multiplier=0.31), head_dim=7).value == 0.31
    assert expected_scale(Block(config("t5")), "layers.0", config("granite", attention_multiplier=0.31), head_dim=7).value == 1.0


def test_the_layer_is_read_from_the_name() -> None:
    model = Block(config("gpt2", scale_attn_by_inverse_layer_idx=True))
    assert expected_scale(model, "layers.1", head_dim=7).value == pytest.approx(7**-0.5 / 2)
    assert expected_scale(model, "layers.1", head_dim=7, layer=4).value == pytest.approx(7**-0.5 / 5)
    assert expected_scale(model, "inner.out_proj", head_dim=7).value is None


@pytest.mark.parametrize(
    "model", [nn.Linear(2, 3), Block(), Block(config("nobody_knows")), Block(SimpleNamespace(model_type=None))]
)
def test_an_unknown_architecture_gets_the_usual_rule_and_no_certainty(model: nn.Module) -> None:
    expected = expected_scale(model, "nowhere", head_dim=7)
    assert (expected.certain, expected.architecture) == (False, "")
    assert expected.value == pytest.approx(7**-0.5)
    assert "not in attemper's table" in expected.source


def test_modules_around_go_outwards() -> None:
    model = Block()
    assert modules_around(model, "layers.1") == [model.layers[1], model.layers, model]
    assert modules_around(model, "") == [model]


def test_the_class_of_a_module_goes_before_the_config_of_its_model() -> None:
    audio = type("Gemma4AudioAttention", (nn.Module,), {})()
    audio.config = config("gemma4")
    assert expected_scale(audio, "", head_dim=7).value is None


def test_the_package_of_a_class_speaks_where_the_model_type_is_of_a_part() -> None:
    part = type("BertSelfAttention", (nn.Module,), {"__module__": "transformers.models.bert.modeling_bert"})()
    part.config = config("bert_of_a_kind")
    expected = expected_scale(part, "", head_dim=7)
    assert (expected.certain, expected.architecture) == (True, "bert")
    assert "transformers bert/modeling" in expected.source


YARN = {"rope_type": "yarn", "factor": 8.0}


def test_a_stretched_rope_is_named_in_the_rule() -> None:
    expected = expected_scale(Block(config("llama", rope_parameters=YARN)), "layers.0", head_dim=7)
    assert expected.rule == "1/sqrt(d_head), times the yarn attention factor squared"


@pytest.mark.parametrize("rope", [YARN, YARN | {"mscale_all_dim": 1.0}])
def test_rope_turns_only_a_part_of_latent_attention(rope: dict[str, Any]) -> None:
    site = Site(config("deepseek_v3", rope_parameters=rope), 13)
    plain, design = rules.multi_latent(site), with_rope(rules.multi_latent(site), site)
    assert replace(design, turned=None) == plain
    assert design.turned is not None
    assert design.turned.value == pytest.approx((0.1 * math.log(8.0) + 1) ** 2)


def test_a_config_that_refuses_a_field_counts_as_without_it() -> None:
    class Refusing:
        @property
        def head_dim(self) -> int:
            raise RuntimeError("head_dim differs by layer")

    assert setting(Refusing(), "head_dim") is None
    assert setting(Refusing(), "head_dim", 3) == 3
    assert setting(None, "head_dim") is None
