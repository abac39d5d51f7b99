"""Faults put into models on purpose: each is found under its own code, and is not there before."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attemper
from attemper.errors import LoadError
from attemper.report import Finding, Report, Severity
from tests import checkpoints
from tests.capture.architectures import build

BATCH, HEADS, TOKENS, WIDTH = 2, 3, 29, 8


class Bare(nn.Module):
    """Attention over the q, k and v that it is given."""

    def __init__(self, mask: Tensor | None = None, *, is_causal: bool = False) -> None:
        super().__init__()
        self.attention = _Attention(mask, is_causal)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attention(q, k, v)


class _Attention(nn.Module):
    def __init__(self, mask: Tensor | None, is_causal: bool) -> None:
        super().__init__()
        self.mask, self.causal = mask, is_causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, self.mask, is_causal=self.causal, scale=WIDTH**-0.5)


def qkv(seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(BATCH, HEADS, TOKENS, WIDTH, generator=generator) for name in "qkv"}


def found(report: Report, code: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.code == code]


def codes(report: Report) -> set[str]:
    return {finding.code for finding in report.findings}


def scale_projections(model: nn.Module, factor: float, layer: int = 1) -> None:
    attention = model.model.layers[layer].self_attn
    with torch.no_grad():
        attention.q_proj.weight *= factor
        attention.k_proj.weight *= factor


def test_a_sound_model_is_clean() -> None:
    for model in (checkpoints.llama(), checkpoints.bert()):  # random weights are uniform, and that is said
        report = attemper.check(model)
        assert codes(report) == {"ATT303"}
        assert report.exit_code("warning") == 0
    assert attemper.check(Bare(), qkv()).exit_code("info") == 0


class TestProductOverflow:
    def report(self, dtype: torch.dtype, factor: float = 1.2e4) -> Report:
        model = checkpoints.llama().to(dtype)
        scale_projections(model, factor if dtype == torch.float32 else 300.0)
        return attemper.check(model, select="ATT201")

    def test_a_warning_where_float16_was_not_asked_for(self) -> None:
        (finding,) = found(self.report(torch.float32), "ATT201")
        assert finding.severity is Severity.WARNING
        assert finding.module == "model.layers.1.self_attn"
        assert finding.measured is not None
        assert finding.measured > 65504 == finding.threshold

    @pytest.mark.parametrize(("attn", "severity"), [("eager", Severity.ERROR), ("sdpa", Severity.WARNING)])
    def test_an_error_where_the_models_own_code_does_it(self, attn: str, severity: Severity) -> None:
        model = checkpoints.llama()
        model.set_attn_implementation(attn)
        scale_projections(model, 1500.0)
        (finding,) = found(attemper.check(model.half(), select="ATT201"), "ATT201")
        assert finding.severity is severity
        assert "softmax in float32) breaks 74 of 80 rows" in finding.message
        assert "weights rounded to it) holds." in finding.message
        assert ("The model's code does this (eager)" in finding.cost) is (attn == "eager")
        assert "a fused kernel" in finding.remedy

    def test_silent_just_below(self) -> None:
        inputs = qkv()
        inputs["q"], inputs["k"] = torch.full_like(inputs["q"], 90.4), torch.full_like(inputs["k"], 90.4)
        report = attemper.check(Bare(), inputs)
        assert report.totals.product_absmax == pytest.approx(8 * 90.4**2, rel=1e-5)
        assert "ATT201" not in codes(report)
        inputs["q"] = inputs["q"] * 1.01
        assert "ATT201" in codes(attemper.check(Bare(), inputs))


class TestLargeLogits:
    def test_sharp(self) -> None:
        inputs = qkv()
        inputs["q"] = inputs["q"] * 60
        (finding,) = found(attemper.check(Bare(), inputs), "ATT202")
        assert finding.severity is Severity.WARNING
        assert "above the mean of its row" in finding.message
        assert "offset" not in finding.message

    def test_a_common_offset_is_not_saturation(self) -> None:
        # As in DINOv2: logits of 300 ± a few, because every key has one large component in common.
        inputs = qkv()
        inputs["q"][..., 0] = 30.0
        inputs["k"][..., 0] = 300.0 / 30.0 * math.sqrt(WIDTH)
        report = attemper.check(Bare(), inputs)
        (finding,) = found(report, "ATT202")
        assert 290 < report.totals.max_logit < 320
        assert finding.severity is Severity.INFO
        assert "This is not saturation" in finding.message
        assert codes(report) == {"ATT202", "ATT205"}  # code that writes such logits in bfloat16 has steps of 2 there
        assert report.exit_code("warning") == 0

    def test_silent_below_the_threshold(self) -> None:
        inputs = qkv()
        inputs["q"] = inputs["q"] * (99.0 / attemper.check(Bare(), inputs).totals.max_logit)
        assert "ATT202" not in codes(attemper.check(Bare(), inputs))
        inputs["q"] = inputs["q"] * (101.0 / 99.0)
        assert "ATT202" in codes(attemper.check(Bare(), inputs))


class TestSaturation:
    def test_projections_that_grew(self) -> None:
        model = checkpoints.llama()
        scale_projections(model, 50.0)
        (finding,) = found(attemper.check(model), "ATT301")
        assert finding.module == "model.layers.1.self_attn"
        assert finding.severity is Severity.WARNING
        assert finding.heads

    def test_one_head_of_three(self) -> None:
        inputs = qkv()
        inputs["q"][:, 1] *= 200
        (finding,) = found(attemper.check(Bare(), inputs), "ATT301")
        assert finding.heads == (1,)
        assert finding.measured is not None
        assert finding.measured > 0.9

    def test_two_keys_in_the_same_place_share_the_weight(self) -> None:
        inputs = qkv()
        inputs["k"] = inputs["k"][..., :1, :].expand(-1, -1, TOKENS, -1).contiguous()
        inputs["q"] = inputs["q"] * 200
        assert "ATT301" not in codes(attemper.check(Bare(), inputs))


class TestSinks:
    def inputs(self, key: int, strength: float) -> dict[str, Tensor]:
        inputs = qkv()
        inputs["q"][:, 2, :, 0] = 4.0
        inputs["k"][:, 2, key, 0] += strength
        return inputs

    def test_a_sink_is_described(self) -> None:
        (finding,) = found(attemper.check(Bare(), self.inputs(0, 4.0)), "ATT302")
        assert finding.severity is Severity.INFO
        assert finding.heads == (2,)
        assert "the first token" in finding.message

    def test_a_sink_elsewhere_is_named(self) -> None:
        (finding,) = found(attemper.check(Bare(), self.inputs(5, 4.0)), "ATT302")
        assert "key 5" in finding.message

    def test_at_rest_on_the_first_token_is_not_saturation(self) -> None:
        report = attemper.check(Bare(), self.inputs(0, 12.0))
        assert codes(report) == {"ATT302"}

    def test_at_rest_elsewhere_is(self) -> None:
        assert codes(attemper.check(Bare(), self.inputs(5, 12.0))) == {"ATT302", "ATT304"}


class TestFullyMaskedRows:
    def test_a_row_that_sees_nothing(self) -> None:
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
        mask[7] = False
        (finding,) = found(attemper.check(Bare(mask), qkv()), "ATT401")
        assert finding.severity is Severity.ERROR
        assert finding.measured == BATCH
        assert f"{BATCH} of {BATCH * TOKENS} real tokens" in finding.message

    def test_a_padded_row_may(self) -> None:
        # The last five positions are padding: nobody sees them, and they see nothing.
        real = torch.arange(TOKENS) < TOKENS - 5
        assert "ATT401" not in codes(attemper.check(Bare(real[:, None] & real), qkv()))

    def test_a_whole_sequence_that_is_masked_is_found_by_the_inputs_own_mask(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from transformers.models.bert import modeling_bert

        def hide_all(*, attention_mask: Tensor, **_rest: Any) -> Tensor:
            return torch.zeros(len(attention_mask), 1, attention_mask.shape[1], attention_mask.shape[1], dtype=torch.bool)

        monkeypatch.setattr(modeling_bert, "create_bidirectional_mask", hide_all)
        assert "ATT401" in codes(attemper.check(checkpoints.bert()))


class TestFuture:
    def test_a_decoder_that_lost_its_mask(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from transformers.models.llama import modeling_llama

        def everything(*, inputs_embeds: Tensor, **_rest: Any) -> Tensor:
            batch, tokens = inputs_embeds.shape[:2]
            return torch.ones(batch, 1, tokens, tokens, dtype=torch.bool)

        monkeypatch.setattr(modeling_llama, "create_causal_mask", everything)
        (finding,) = found(attemper.check(checkpoints.llama()), "ATT402")
        assert finding.severity is Severity.ERROR
        assert finding.module == "model.layers.0.self_attn"
        assert "it is a LlamaForCausalLM" in finding.message

    @pytest.mark.parametrize("position", [0, TOKENS // 2 - 1])
    def test_one_layer_of_three_and_one_position(self, position: int) -> None:
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        model = Stack([mask, mask, mask])
        assert "ATT402" not in codes(attemper.check(model))
        leaky = mask.clone()
        leaky[position, -1] = True
        (finding,) = found(attemper.check(Stack([mask, leaky, mask])), "ATT402")
        assert finding.module == "layers.1"
        assert "6 of its 9 self-attention heads are" in finding.message
        assert finding.heads == ()
        assert f"from position {position} on" in finding.message

    def test_one_head_of_each_layer(self) -> None:
        mask = torch.ones(HEADS, TOKENS, TOKENS, dtype=torch.bool).tril()
        mask[1] = True
        (finding,) = found(attemper.check(Stack([mask, mask])), "ATT402")
        assert "4 of its 6 self-attention heads are" in finding.message
        assert finding.module == "layers.0"
        assert finding.heads == (1,)

    def test_one_step_ahead(self) -> None:
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        (finding,) = found(attemper.check(Stack([mask, mask, mask | mask.roll(1, dims=1).tril(1)])), "ATT402")
        assert finding.module == "layers.2"

    def test_nothing_is_claimed_for_an_encoder(self) -> None:
        report = attemper.check(checkpoints.bert())
        assert "ATT402" not in codes(report)
        assert any("nothing says that it is causal" in note for note in report.notes)

    @pytest.mark.parametrize("name", ["t5", "whisper", "bart"])
    def test_the_decoder_of_an_encoder_decoder_is_tried(self, name: str) -> None:
        model, inputs = build(name)
        report = attemper.check(model, dict(inputs))
        assert "ATT402" not in codes(report)
        assert not any("causal" in note or "could not be tried" in note for note in report.notes)


class Stack(nn.Module):
    """Layers of attention with a residual stream, each with its own mask."""

    def __init__(self, masks: list[Tensor]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(SelfAttention(mask) for mask in masks)

    def example_inputs(self) -> dict[str, Tensor]:
        return {"x": torch.randn(BATCH, TOKENS, HEADS * WIDTH, generator=torch.Generator().manual_seed(5))}

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class SelfAttention(nn.Module):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        width = HEADS * WIDTH
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, self.mask).transpose(1, 2).flatten(-2))


def test_a_mask_that_hides_everything() -> None:
    nothing = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    report = attemper.check(Stack([nothing, ~nothing]))
    (finding,) = found(report, "ATT401")
    assert f"{BATCH * TOKENS} of {BATCH * TOKENS} real tokens" in finding.message


@pytest.mark.parametrize("scale", [math.nan, math.inf])
def test_a_scale_that_is_no_number(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    plain = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, mask: plain(q, k, v, mask, scale=scale))
    report = attemper.check(Stack([torch.ones(TOKENS, TOKENS, dtype=torch.bool)]))
    assert {"ATT104", "ATT203"} <= codes(report)


class TestPadding:
    def test_an_encoder_that_ignores_its_mask(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from transformers.models.bert import modeling_bert

        monkeypatch.setattr(modeling_bert, "create_bidirectional_mask", lambda **_rest: None)
        (finding,) = found(attemper.check(checkpoints.bert()), "ATT403")
        assert finding.severity is Severity.ERROR
        assert finding.module == "encoder.layer.0.attention.self"

    def test_a_leak_past_attention_is_not_laid_to_attention(self) -> None:
        model = checkpoints.bert()
        # A convolution over the tokens, say, which has never heard of padding.
        model.embeddings.register_forward_hook(lambda _module, _args, output: output + output.roll(-1, dims=1))
        assert "ATT403" not in codes(attemper.check(model))

    def test_an_encoder_of_an_encoder_decoder_that_ignores_its_mask(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Its tokens are embedded by a module of the encoder's own; the model's holds the weights that both sides share.
        from transformers.models.bart import modeling_bart

        model, inputs = build("bart")
        assert "ATT403" not in codes(attemper.check(model, dict(inputs)))
        monkeypatch.setattr(modeling_bart, "create_bidirectional_mask", lambda **_rest: None)
        (finding,) = found(attemper.check(model, dict(inputs)), "ATT403")
        assert finding.module == "model.encoder.layers.0.self_attn"

    def test_one_that_heeds_it_is_clean(self) -> None:
        report = attemper.check(checkpoints.bert())
        assert report.inputs.startswith("random token ids")
        assert codes(report) == {"ATT303"}


class TestNotFinite:
    @staticmethod
    def spoil(model: nn.Module, name: str, value: float = math.nan) -> nn.Module:
        with torch.no_grad():
            model.get_parameter(name).view(-1)[3] = value
        return model

    @pytest.mark.parametrize(
        ("parameter", "words"),
        [
            ("model.layers.1.mlp.up_proj.weight", "this is not attention"),
            ("model.layers.2.self_attn.k_proj.weight", "this is attention"),
            ("model.layers.0.input_layernorm.weight", "this is not attention"),
            ("lm_head.weight", "this is not attention"),
        ],
    )
    def test_the_module_and_the_parameter_are_named(self, parameter: str, words: str) -> None:
        (finding,) = found(attemper.check(self.spoil(checkpoints.llama(), parameter)), "ATT203")
        assert finding.module == parameter.rpartition(".")[0]
        assert f"its parameter {parameter} is itself not finite" in finding.message
        assert words in finding.message
        assert finding.severity is Severity.ERROR

    def test_a_model_that_is_nothing_but_attention(self) -> None:
        model = self.spoil(nn.MultiheadAttention(20, 5), "in_proj_weight")
        (finding,) = found(attemper.check(model, (torch.randn(7, 2, 20),) * 3), "ATT203")
        assert "this is attention" in finding.message

    def test_a_residual_stream_that_passes_float16(self) -> None:
        # The kind of Gemma 3: each sum is finite in float32, attention has headroom, and the stream leaves float16's range.
        model = checkpoints.llama()
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.fill_(1.0)
            model.model.layers[0].mlp.gate_proj.weight.fill_(9.0)
            model.model.layers[0].mlp.up_proj.weight.fill_(9.0)
        in_float32 = attemper.check(model)
        assert codes(in_float32) - {"ATT303"} == {"ATT204"}
        (described,) = found(in_float32, "ATT204")
        assert "(not in attention)" in described.message
        assert "times headroom, and of the rows that were run every order of operations holds in float16." in described.message
        (finding,) = found(attemper.check(model.half()), "ATT203")
        assert "this is not attention" in finding.message
        assert finding.module.startswith("model.layers.0.mlp")
        assert "float16" in finding.message

    def test_inputs_that_are_not_numbers(self) -> None:
        inputs = qkv() | {"k": torch.full((BATCH, HEADS, TOKENS, WIDTH), math.nan)}
        with pytest.raises(LoadError, match="inputs: 'k' holds NaN"):
            attemper.check(Bare(), inputs)

    def test_a_sum_between_modules_is_laid_to_the_module_that_adds(self) -> None:
        class Adds(Stack):
            def forward(self, x: Tensor) -> Tensor:
                return self.layers[1](x + self.layers[0](x) * math.inf)

        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
        (finding,) = found(attemper.check(Adds([mask, mask])), "ATT203")
        assert finding.module == ""
        assert "before layers.1" in finding.message

    def test_what_stands_at_padded_positions_only_is_no_fault(self) -> None:
        model = checkpoints.llama()

        positions = []

        def spoil_output(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
            ids = positions[0]
            return torch.where((ids == 0).unsqueeze(-1), math.nan, output)

        model.model.embed_tokens.register_forward_hook(lambda _module, args, _output: positions.append(args[0]))
        model.model.norm.register_forward_hook(spoil_output)
        report = attemper.check(model)
        assert bool((positions[0] == 0).any())
        assert "ATT203" not in codes(report)


ARCHITECTURES = (
    "llama",
    "gemma3",
    "gpt_oss",
    "granite",
    "opt",
    "gpt2",
    "bert",
    "roberta",
    "esm",
    "t5",
    "whisper",
    "vit",
    "clip",
    "swin",
)


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sound_architectures_give_no_error_and_no_warning(name: str, padding: str) -> None:
    model, inputs = build(name, padding=padding)
    report = attemper.check(model, dict(inputs))
    assert report.rows
    assert not [finding for finding in report.findings if finding.severity is not Severity.INFO]


def test_the_model_is_left_as_it_was() -> None:
    model = checkpoints.llama(attention_dropout=0.3).train()
    model.model.layers[1].mlp.eval()
    before = [module.training for module in model.modules()]
    hooks = count_hooks(model)
    attemper.check(model)
    assert [module.training for module in model.modules()] == before
    assert count_hooks(model) == hooks
    assert all(parameter.grad is None for parameter in model.parameters())


def count_hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
