"""Weights alone: bounds hold on every model and are what an independent computation gives; what is not known is said."""

import json
from pathlib import Path

import jsonschema
import pytest
import torch
from torch import nn

import attemper
from attemper.errors import ArgumentError
from attemper.report import Report, Severity
from tests.capture.architectures import build
from tests.report.test_formats import schema

FAULTS = "attemper.examples.faults"
BOUNDED = (
    "llama",
    "gemma2",
    "gemma3",
    "qwen3",
    "olmo2",
    "nemotron",
    "opt",
    "gpt2",
    "falcon",
    "gptj",
    "phi3",
    "bert",
    "distilbert",
)
BOUNDED += ("t5", "whisper", "vit", "swin", "clip", "cohere", "persimmon", "xglm", "t5gemma")


@pytest.mark.parametrize("name", BOUNDED)
def test_no_logit_of_a_run_exceeds_its_bound(name: str) -> None:
    model, inputs = build(name, gain=5.0)
    rows = {row.module: row for row in attemper.check(model, weights_only=True).weights}
    compared = 0
    for row in attemper.check(model, dict(inputs)).rows:
        bounds = rows[row.module].bounds
        if bounds and row.scale is not None:
            assert bool((row.stats.product_absmax * row.scale <= torch.tensor(bounds, dtype=torch.float64)).all())
            compared += 1
    assert compared


def test_the_bound_against_singular_values() -> None:
    model, _ = build("gpt2", gain=5.0)
    with torch.no_grad():
        for layer in model.transformer.h:
            layer.ln_1.weight.normal_()
            layer.ln_1.bias.normal_()
            layer.attn.c_attn.bias.normal_()
    row = attemper.check(model, weights_only=True).weights[1]
    block, width, heads = model.transformer.h[1], 24, 4
    weight, bias = block.attn.c_attn.weight.detach().double().T, block.attn.c_attn.bias.detach().double()
    gain, shift = block.ln_1.weight.detach().double(), block.ln_1.bias.detach().double()
    lengths = []
    for part in (0, 1):
        w = weight[part * width : (part + 1) * width].unflatten(0, (heads, -1))
        b = bias[part * width : (part + 1) * width].unflatten(0, (heads, -1))
        sigma = torch.linalg.svdvals(w * gain)[:, 0]
        lengths.append(sigma * width**0.5 + (w @ shift + b).norm(dim=-1))
    expected = (lengths[0] * lengths[1] * (width / heads) ** -0.5).tolist()
    assert row.bounds == pytest.approx(expected, rel=1e-9)
    assert row.norm == "transformer.h.1.ln_1"
    norms = [float(torch.linalg.svdvals(weight[part * width : (part + 1) * width])[0]) for part in range(3)]
    assert [row.query_norm, row.key_norm, row.value_norm] == pytest.approx(norms, rel=1e-5)


def test_an_input_that_reaches_the_bound() -> None:
    model, _ = build("llama")
    attention, norm = model.model.layers[0].self_attn, model.model.layers[0].input_layernorm
    with torch.no_grad():  # rank one, and the same direction for q and k
        direction = torch.ones(24) / 24**0.5
        attention.q_proj.weight.copy_(torch.ones(40, 1) * direction)
        attention.k_proj.weight.copy_(torch.ones(20, 1) * direction)
        q = attention.q_proj(norm(direction))[:10]
        k = attention.k_proj(norm(direction))[:10]
    bound = attemper.check(model, weights_only=True).weights[0].bounds[0]
    assert float(q @ k) * 10**-0.5 == pytest.approx(bound, rel=1e-3)  # the norm's epsilon


class TestCrossAttention:
    def test_queries_and_keys_have_norms_of_their_own(self) -> None:
        model, _ = build("whisper", gain=5.0)
        block, last = model.model.decoder.layers[1], model.model.encoder.layer_norm
        with torch.no_grad():
            for norm in (block.encoder_attn_layer_norm, last):
                norm.weight.normal_()
                norm.bias.normal_()
        (row,) = (each for each in attemper.check(model, weights_only=True).weights if "1.encoder_attn" in each.module)
        lengths = []
        for projection, norm in ((block.encoder_attn.q_proj, block.encoder_attn_layer_norm), (block.encoder_attn.k_proj, last)):
            w = projection.weight.detach().double().unflatten(0, (4, 6))
            b = 0.0 if projection.bias is None else projection.bias.detach().double().unflatten(0, (4, 6))
            sigma = torch.linalg.svdvals(w * norm.weight.detach().double())[:, 0]
            lengths.append(sigma * 24**0.5 + (w @ norm.bias.detach().double() + b).norm(dim=-1))
        assert row.bounds == pytest.approx((lengths[0] * lengths[1] * 6**-0.5).tolist(), rel=1e-9)
        assert row.norm == "model.decoder.layers.1.encoder_attn_layer_norm, keys: model.encoder.layer_norm"

    @pytest.mark.parametrize("name", ["whisper", "t5", "t5gemma"])
    def test_every_call_is_bounded(self, name: str) -> None:
        model, _ = build(name)
        report = attemper.check(model, weights_only=True)
        assert all(row.bounds for row in report.weights)
        assert sum("keys: " in row.norm for row in report.weights) == 2
        assert report.unseen == ()

    def test_where_the_norms_are_not_known(self) -> None:
        model, _ = build("bart")
        report = attemper.check(model, weights_only=True)
        (words,) = {reason for module, reason in report.unseen if "encoder_attn" in module}
        assert "its keys are made of what an encoder gives (cross attention)" in words
        assert "\n\nno bound\n  model.encoder.layers.0.self_attn" in str(report)
        assert "not seen" not in str(report)


class TestFindings:
    def test_the_bound(self) -> None:
        (finding,) = attemper.check(f"{FAULTS}:logit_bound", weights_only=True, select="ATT306").findings
        assert finding.severity is Severity.INFO
        assert finding.module == "attention"
        row = attemper.check(f"{FAULTS}:logit_bound", weights_only=True).weights[0]
        assert finding.measured == max(row.bounds)
        above = {"logit-bound": max(row.bounds) + 1}
        assert attemper.check(f"{FAULTS}:logit_bound", weights_only=True, thresholds=above, select="ATT306").findings == ()

    def test_a_warning_in_float16(self) -> None:
        report = attemper.check(f"{FAULTS}:logit_bound", weights_only=True, dtype="float16", select="ATT306")
        assert [finding.severity for finding in report.findings] == [Severity.WARNING]
        assert "past float16's 65504" in report.findings[0].message

    def test_norms_that_ran_away(self) -> None:
        name = f"{FAULTS}:query_and_key_outgrow_value"
        (finding,) = attemper.check(name, weights_only=True).findings
        assert finding.code == "ATT307"
        row = attemper.check(name, weights_only=True).weights[0]
        assert row.query_norm is not None
        assert row.key_norm is not None
        assert row.value_norm is not None
        ratio = (row.query_norm * row.key_norm) ** 0.5 / row.value_norm
        assert finding.measured == pytest.approx(ratio)
        assert attemper.check(name, weights_only=True, thresholds={"norm-ratio": ratio * 1.01}).findings == ()

    @pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "qwen3", "vit"])
    def test_sound_models_have_none(self, name: str) -> None:
        model, _ = build(name)
        assert attemper.check(model, weights_only=True).findings == ()

    def test_qk_norm_makes_the_norms_meaningless(self) -> None:
        model, _ = build("qwen3")
        with torch.no_grad():
            model.model.layers[0].self_attn.q_proj.weight *= 1e6
        report = attemper.check(model, weights_only=True)
        assert report.findings == ()
        assert report.weights[0].norm == "QK-norm"


class TestWhatIsNotKnown:
    def test_no_norm_in_front(self) -> None:
        report = attemper.check(f"{FAULTS}:large_logits", weights_only=True)
        assert report.weights[0].bounds == ()
        assert report.unseen == (
            (
                "attention",
                "its logits are not bounded: no norm is known to stand in front of it, so its input may be of any size",
            ),
        )

    def test_post_norm_layers_of_another_order(self) -> None:
        layer = nn.TransformerEncoderLayer(20, 5, batch_first=True)
        assert attemper.check(layer, weights_only=True).weights[0].bounds == ()
        layer = nn.TransformerEncoderLayer(20, 5, batch_first=True, norm_first=True)
        assert attemper.check(layer, weights_only=True).weights[0].norm == "norm1"

    @pytest.mark.parametrize(
        ("name", "words"), [("deepseek_v3", "made elsewhere"), ("deberta_v2", "has no row in the table|adds products")]
    )
    def test_layouts(self, name: str, words: str) -> None:
        model, _ = build(name)
        report = attemper.check(model, weights_only=True)
        assert not any(row.bounds for row in report.weights)
        assert report.unseen
        assert any(word in report.unseen[0][1] for word in words.split("|"))

    def test_a_model_without_attention(self) -> None:
        report = attemper.check(nn.Linear(3, 5), weights_only=True)
        assert report.exit_code() == 3
        assert "Nothing to check" in str(report)

    def test_inputs_are_of_no_use(self) -> None:
        model, inputs = build("llama")
        with pytest.raises(ArgumentError, match="weights_only: got inputs or passages as well; expected neither"):
            attemper.check(model, dict(inputs), weights_only=True)


def test_as_text_and_as_json() -> None:
    report = attemper.check(f"{FAULTS}:logit_bound", weights_only=True)
    assert report.exit_code() == 0
    text = str(report)
    assert "logit bound" in text
    assert "attn_norm" in text
    assert text.splitlines()[-1].startswith("1 attention module, 3 heads, by weights alone: 0 errors, 0 warnings, ")
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    jsonschema.Draft202012Validator(schema()).validate(data)
    assert Report.from_dict(data) == report


def test_no_forward_pass(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("the model was run")

    monkeypatch.setattr("attemper.checker.measure.run", refuse)
    assert len(attemper.check(str(llama_folder), weights_only=True).weights) == 3
