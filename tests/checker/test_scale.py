"""Faults put into real architectures are found and named; the same architectures as their authors meant them give nothing."""

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper import check
from attemper.capture import AttentionCall, capture
from attemper.checker.scale import effective, scale_findings
from attemper.checker.scale_measured import Scaling, measure_call
from attemper.checker.thresholds import DEFAULTS
from attemper.report import Finding, Severity
from tests.capture.architectures import ARCHITECTURES, HEAD_DIM, HIDDEN, build

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16}


def evidence(model: nn.Module, inputs: dict[str, Tensor]) -> Any:
    """Only what the scale rules read."""
    calls: list[Any] = []

    def observe(call: AttentionCall) -> None:
        calls.append(SimpleNamespace(module=call.module, call=call.call, scaling=measure_call(call)))

    with torch.no_grad(), capture(model, observe, follow_projections=True):
        model(**inputs)
    assert calls
    return SimpleNamespace(model=model, config=getattr(model, "config", None), calls=calls, thresholds=DEFAULTS, misread=())


def findings(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Finding, ...]:
    return scale_findings(evidence(model, inputs))


def scaled_modules(model: nn.Module) -> Iterator[tuple[nn.Module, str, int]]:
    """Attention modules that keep their scale in an attribute: the module, the attribute, the width of q and k."""
    for module in model.modules():
        attribute = next((name for name in ("scaling", "scale") if isinstance(getattr(module, name, None), (int, float))), None)
        widths = (
            getattr(module, name, None) for name in ("qk_head_dim", "head_dim", "attention_head_size", "key_value_proj_dim")
        )
        width = next((width for width in widths if isinstance(width, int)), None)
        if attribute and width:
            yield module, attribute, width


def inject(model: nn.Module, scale: Callable[[nn.Module, int], float]) -> None:
    modules = list(scaled_modules(model))
    assert modules
    for module, attribute, width in modules:
        setattr(module, attribute, scale(module, width))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_as_its_authors_meant_it_gives_nothing(name: str) -> None:
    model, inputs = build(name, gain=3.0)  # logits away from zero, so that an argument that is ignored shows
    assert findings(model, inputs) == ()
    report = check(model, dict(inputs), select="ATT1")
    assert report.rows
    assert report.findings == ()


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("granite", {"attention_multiplier": 0.31}),
        ("granite", {"attention_multiplier": 1.0}),
        ("gemma2", {"query_pre_attn_scalar": 29}),
        ("gemma3", {"query_pre_attn_scalar": 29}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("gpt2", {"scale_attn_weights": False}),
        ("gpt2", {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True}),
        ("gpt_bigcode", {"scale_attn_weights": False}),
        ("llama", {"rope_parameters": YARN}),
        ("qwen3", {"rope_parameters": YARN}),
        ("gpt_oss", {"rope_parameters": YARN}),
        ("deepseek_v2", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}}),
        ("llama4", {"attn_scale": 0.1, "floor_scale": 8192}),
    ],
)
def test_settings_of_the_config_are_part_of_the_rule(name: str, config: dict[str, Any]) -> None:
    assert findings(*build(name, **config)) == ()


WITHOUT = (
    *("llama", "mistral", "qwen3", "gemma2", "gemma3", "gpt2", "gpt_oss", "olmo2", "llama4", "opt"),
    *("bert", "distilbert", "albert", "vit", "clip", "whisper"),
)


@pytest.mark.parametrize("name", WITHOUT)
def test_a_missing_scale_is_found(name: str) -> None:
    model, inputs = build(name)
    inject(model, lambda _module, _width: 1.0)
    found = findings(model, inputs)
    assert {(finding.code, finding.severity) for finding in found} == {("ATT101", Severity.ERROR)}
    for finding in found:
        width = {"gemma2": 17, "gemma3": 17}.get(name, 10 if "(d_head 10)" in finding.message else 6)
        assert finding.measured / finding.threshold == pytest.approx(width**0.5, rel=1e-5)


@pytest.mark.parametrize("name", ["llama", "mistral", "bert", "distilbert", "vit", "clip", "gpt2", "whisper", "opt", "olmo2"])
def test_a_scale_applied_twice_is_found(name: str) -> None:
    model, inputs = build(name)
    inject(model, lambda _module, width: 1 / width)
    assert {(finding.code, finding.severity) for finding in findings(model, inputs)} == {("ATT102", Severity.ERROR)}


@pytest.mark.parametrize("name", ["t5", "mt5"])
def test_a_scale_on_weights_that_carry_it_is_a_second_one(name: str) -> None:
    model, inputs = build(name)
    inject(model, lambda _module, width: width**-0.5)
    assert {finding.code for finding in findings(model, inputs)} == {"ATT102"}


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gemma2", "bert", "vit", "gpt2", "gpt_oss", "whisper", "opt"])
def test_the_width_of_the_model_taken_for_the_heads_is_found(name: str) -> None:
    model, inputs = build(name)
    inject(model, lambda _module, _width: HIDDEN**-0.5)
    found = findings(model, inputs)
    assert {(finding.code, finding.severity) for finding in found} == {("ATT103", Severity.ERROR)}
    assert all("24" in finding.message for finding in found)


@pytest.mark.parametrize("name", ["granite", "gemma2", "gemma3", "gemma4", "gemma3n", "zamba2"])
def test_a_rule_of_the_config_ignored_is_found(name: str) -> None:
    model, inputs = build(name)
    inject(model, lambda _module, width: width**-0.5)
    found = findings(model, inputs)
    assert {finding.code for finding in found} == {"ATT104"}
    assert all("rule of the architecture ignored" in finding.message for finding in found)


def test_gpt2_run_by_a_backend_that_ignores_its_flag() -> None:
    model, inputs = build("gpt2", scale_attn_by_inverse_layer_idx=True)
    inject(model, lambda _module, width: width**-0.5)
    (finding,) = findings(model, inputs)  # the first layer is divided by 1
    assert (finding.code, finding.module) == ("ATT104", "transformer.h.1.attn")
    assert finding.measured / finding.threshold == pytest.approx(2.0)
    assert "scale_attn_by_inverse_layer_idx" in finding.message


@pytest.mark.parametrize(
    ("flags", "scale", "words"),
    [
        ({"scale_attn_weights": False}, lambda width, _layer: width**-0.5, "flag ignored: scale_attn_weights"),
        (
            {"scale_attn_by_inverse_layer_idx": False},
            lambda width, layer: width**-0.5 / (layer + 1),
            "flag ignored: the config switches scale_attn_by_inverse_layer_idx off",
        ),
        (
            {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True},
            lambda _width, _layer: 1.0,
            "flag ignored: scale_attn_by_inverse_layer_idx",
        ),
    ],
)
def test_a_flag_of_the_config_that_is_ignored_is_named(flags: dict[str, Any], scale: Any, words: str) -> None:
    model, inputs = build("gpt2", n_layer=3, **flags)
    for module, attribute, width in list(scaled_modules(model)):
        setattr(module, attribute, scale(width, module.layer_idx))
    last = findings(model, inputs)[-1]  # 1/2, in the layer before, is also the ratio of 1/sqrt(24) to 1/sqrt(6)
    assert (last.code, last.severity, last.module) == ("ATT104", Severity.ERROR, "transformer.h.2.attn")
    assert words in last.message


def test_a_scale_that_may_hide_in_a_query_is_a_warning() -> None:
    class Hidden(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (each(x).unflatten(-1, (3, 13)).transpose(1, 2) for each in (self.q_proj, self.k_proj, self.v_proj))
            q = (q + 0.2 * q.roll(1, -1)) * 13**-0.5  # a mixing that keeps no norm
            return self.out(F.scaled_dot_product_attention(q, k, v, scale=1.0).transpose(1, 2).flatten(-2))

    torch.manual_seed(3)
    (finding,) = findings(Hidden(model_type="llama"), {"x": torch.randn(2, 7, 17)})
    assert (finding.code, finding.severity) == ("ATT101", Severity.WARNING)
    assert "q could not be followed" in finding.message


def test_the_logits_themselves_tell_a_scale_that_was_misread() -> None:
    class BehindItsBack(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (each(x).unflatten(-1, (3, 13)).transpose(1, 2) for each in (self.q_proj, self.k_proj, self.v_proj))
            z = q @ k.mT
            z.view(-1).mul_(1 / 13)  # through a view: the product itself is never an argument
            return self.out((z.softmax(-1) @ v).transpose(1, 2).flatten(-2))

    torch.manual_seed(3)
    report = check(nn.Sequential(BehindItsBack(model_type="opt")), (torch.randn(2, 7, 17),), select="ATT1")
    assert [each for each, _ in report.unseen] == ["0"]
    (finding,) = report.findings
    assert finding.code == "ATT102"
    assert finding.measured == pytest.approx(1 / 13, rel=1e-5)
    assert "regression of its logits" in finding.message


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2"])
def test_latent_attention_without_mscale(name: str) -> None:
    mscale = 0.1 * math.log(8.0) + 1
    rope = {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}
    for power, words in ((0, "mscale^2 = 1.4591 is missing"), (1, "mscale = 1.2079 is applied once instead of twice")):
        model, inputs = build(name, **rope)
        inject(model, lambda _module, width, power=power: width**-0.5 * mscale**power)
        found = findings(model, inputs)
        assert len(found) == 2
        assert all(finding.code == "ATT104" and words in finding.message for finding in found)


def test_a_scale_rounded_to_bfloat16_is_a_description() -> None:
    model, inputs = build("llama")
    inject(model, lambda _module, width: torch.tensor(width**-0.5).bfloat16().item())
    found = findings(model, inputs)
    assert {(finding.code, finding.severity) for finding in found} == {("ATT104", Severity.INFO)}
    assert "bfloat16" in found[0].message


def test_a_finding_says_what_it_costs_and_what_to_do() -> None:
    model, inputs = build("llama")
    inject(model, lambda _module, _width: 1.0)
    finding = findings(model, inputs)[0]
    assert finding.module == "model.layers.0.self_attn"
    assert finding.threshold == pytest.approx(HEAD_DIM**-0.5)
    assert "3.162 times" in finding.cost
    assert "1/sqrt(d_head)" in finding.message
    assert "llama" in finding.source
    assert finding.remedy


def test_a_shared_module_gives_one_finding() -> None:
    model, inputs = build("albert")
    inject(model, lambda _module, _width: 1.0)
    (finding,) = findings(model, inputs)
    assert finding.call == 0


def test_the_effective_scale_of_a_prescaled_model_is_the_usual_one() -> None:
    model, inputs = build("whisper")
    seen = evidence(model, inputs)
    assert len(seen.calls) == 6
    for call in seen.calls:
        scales = effective(model, seen.config, call)
        assert scales is not None
        assert scales.single == pytest.approx(6**-0.5, rel=0.01)


class Attention(nn.Module):
    """A hand-written attention, 3 heads of 13 on a width of 17."""

    def __init__(self, *, scale: float | None = None, prescale: float = 1.0, norm: bool = False, model_type: str = "") -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(17, 39, bias=False) for _ in range(3))
        self.out = nn.Linear(39, 17)
        self.scale, self.prescale, self.norm = scale, prescale, norm
        if model_type:
            self.config = SimpleNamespace(model_type=model_type, hidden_size=17)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (3, 13)).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj))
        if self.norm:
            q, k = F.rms_norm(q, (13,)), F.rms_norm(k, (13,))
        if self.prescale != 1.0:
            q = q * self.prescale
        return self.out(F.scaled_dot_product_attention(q, k, v, scale=self.scale).transpose(1, 2).flatten(-2))


def stack(**kwargs: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(3)
    return nn.Sequential(Attention(**kwargs), Attention(**kwargs)), {"input": torch.randn(2, 7, 17)}


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"scale": 13**-0.5},
        {"scale": 1.0, "prescale": 13**-0.5},
        {"scale": 13**-0.25, "prescale": 13**-0.25},
        {"scale": 1.0, "norm": True},
        {"scale": 1 / 13, "norm": True},
        {"model_type": "opt", "scale": 1.0, "prescale": 13**-0.5},
        {"model_type": "t5", "scale": 1.0},
        {"model_type": "gemma4_text", "scale": 1.0, "norm": True},
    ],
)
def test_a_hand_written_module_that_is_right_gives_nothing(kwargs: dict[str, Any]) -> None:
    assert findings(*stack(**kwargs)) == ()


@pytest.mark.parametrize(
    ("kwargs", "code", "severity"),
    [
        ({"scale": 1.0}, "ATT101", Severity.ERROR),
        ({"prescale": 13**-0.5}, "ATT102", Severity.ERROR),
        ({"scale": 17**-0.5}, "ATT103", Severity.ERROR),
        ({"scale": 1.0, "prescale": 39**-0.5}, "ATT103", Severity.ERROR),
        ({"scale": 1 / 13}, "ATT104", Severity.WARNING),
        ({"scale": 0.05}, "ATT104", Severity.WARNING),
        ({"model_type": "opt", "prescale": 13**-0.5}, "ATT102", Severity.ERROR),  # OPT as SDPA's default scale once ran it
        ({"model_type": "qwen3", "scale": 1.0, "norm": True}, "ATT101", Severity.ERROR),
        ({"model_type": "t5"}, "ATT102", Severity.ERROR),
    ],
)
def test_a_hand_written_module_that_is_wrong_is_found(kwargs: dict[str, Any], code: str, severity: Severity) -> None:
    found = findings(*stack(**kwargs))
    assert [(finding.module, finding.code, finding.severity) for finding in found] == [
        ("0", code, severity),
        ("1", code, severity),
    ]


@pytest.mark.parametrize("training", [False, True])
def test_torchs_own_attention_gives_nothing(training: bool) -> None:
    layer = nn.TransformerEncoderLayer(15, 3, 19, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    assert findings(model, {"src": torch.randn(2, 7, 15)}) == ()


def heads_evidence(scale: Tensor, model: nn.Module) -> Any:
    call = SimpleNamespace(module="0", call=0, scaling=Scaling(head_dim=13, heads=3, scale=scale))
    return SimpleNamespace(model=model, config=None, calls=[call], thresholds=DEFAULTS, misread=())


def test_a_scale_for_each_head_is_judged_for_each_head() -> None:
    model, _ = stack(model_type="llama")
    (finding,) = scale_findings(heads_evidence(torch.tensor([13**-0.5, 1.0, 1.0]), model))
    assert (finding.code, finding.heads) == ("ATT101", (1, 2))
    assert scale_findings(heads_evidence(torch.full((3,), 13**-0.5), model)) == ()


def test_a_scale_that_differs_where_no_rule_is_known_is_left_alone() -> None:
    model, _ = stack()
    assert scale_findings(heads_evidence(torch.tensor([0.2, 0.3, 1.7]), model)) == ()
    assert scale_findings(heads_evidence(torch.rand(2, 3, 7), model)) == ()
    assert len(scale_findings(heads_evidence(torch.ones(2, 3, 7), model))) == 1


def test_a_learned_scale_is_described() -> None:
    model, inputs = build("swinv2")
    for name, parameter in model.named_parameters():
        if name.endswith("logit_scale"):
            with torch.no_grad():
                parameter.copy_(torch.linspace(1, 7, parameter.numel()).view_as(parameter))  # ln 100 is 4.6
    report = check(model, dict(inputs), select="ATT1")
    assert report.findings == ()
    (note,) = (note for note in report.notes if "is learned" in note)
    assert f"from {math.exp(1):.5g} to 100" in note
    row = report.rows[0]
    assert row.scale is None
    assert row.scales is not None
    assert len(row.scales.values) == row.stats.rows.shape[0] > 1
    assert "2.7183…" in str(report)


@pytest.mark.parametrize(("factory", "codes"), [("unscaled", {"ATT101"}), ("scaled", set())])
def test_the_example_models(factory: str, codes: set[str]) -> None:
    examples = pytest.importorskip("attemper.examples")
    model = getattr(examples, factory)()
    layers = sum(1 for name, _ in model.named_modules() if name.rpartition(".")[2] in {"attention", "attn", "self_attn"})
    found = findings(model, {"input_ids": torch.randint(0, 100, (1, 23))})
    assert {finding.code for finding in found} == codes
    assert not codes or len(found) == layers


def test_the_sweep_covers_what_the_issue_names() -> None:
    decoders = "granite zamba2 gemma2 gemma3 gemma4 gpt2 opt llama qwen3 mistral gpt_oss olmo2 deepseek_v2 deepseek_v3 llama4"
    assert set(f"{decoders} t5 whisper albert bert distilbert vit clip esm".split()) <= set(ARCHITECTURES)
    assert set(WITHOUT) <= set(ARCHITECTURES)
