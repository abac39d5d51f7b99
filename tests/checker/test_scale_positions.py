"""Factors by position: measured as a curve, held against the rule's own, and named where they are missing or wrong."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attemper
from attemper import scales
from attemper.checker.scale import effective, position_notes
from attemper.checker.scale_measured import Operand, Scaling
from attemper.checker.scale_positions import ByPosition, of
from attemper.checker.thresholds import DEFAULTS
from attemper.report import Finding, Severity
from tests.capture.architectures import HIDDEN, build
from tests.checker.test_scale import YARN, evidence, findings, scale_findings
from tests.scales.huggingface import CASES, Case, made

BY_NAME = {case.name: case for case in CASES}
POSITIONAL = ("llama4", "ministral3", "mistral4", "inkling", "beam")


def model_of(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    return made(BY_NAME[name])


@pytest.mark.parametrize("name", POSITIONAL)
def test_the_curve_of_the_authors_own_code_is_the_rules(name: str) -> None:
    case, (model, inputs) = BY_NAME[name], model_of(name)
    seen = evidence(model, inputs)
    assert scale_findings(seen) == ()
    measured = effective(model, seen.config, seen.calls[0])
    assert measured is not None
    assert measured.by_position
    wanted = _rule_of(case, seen.calls[0].scaling)
    assert measured.values == pytest.approx((float(wanted.min()), float(wanted.max())), rel=1e-5)
    assert measured.single is None


def _rule_of(case: Case, scaling: Scaling) -> Tensor:
    tokens = scaling.queries
    shape = scales.LogitShape(scaling.head_dim, scaling.heads, queries=tokens, keys=tokens, layer=0)
    return torch.as_tensor(case.rule.factor(shape))


def _without(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, dict[str, Tensor]]:
    """A port that forgot the factor: the config asks for it, the code does not apply it."""
    model, inputs = model_of(name)
    package = f"transformers.models.{name}.modeling_{name}"
    if name == "llama4":
        for module in model.modules():
            if hasattr(module, "attn_temperature_tuning"):
                module.attn_temperature_tuning = False
    elif name == "beam":
        monkeypatch.setattr(
            f"{package}.compute_attention_scaling", lambda positions: torch.ones_like(positions)[:, None, :, None]
        )
    else:
        monkeypatch.setattr(
            f"{package}.get_llama_4_attn_scale", lambda positions, *_rest: torch.ones(1, 1, positions.shape[-1], 1)
        )
    return model, inputs


@pytest.mark.parametrize(
    ("name", "places", "fields"),
    [
        ("llama4", 1, "attn_scale, floor_scale"),
        ("ministral3", 2, "llama_4_scaling_beta"),
        ("mistral4", 2, "llama_4_scaling_beta"),
        ("beam", 1, "attention scaling by position"),
    ],
)
def test_a_position_factor_that_is_missing_is_named(name: str, places: int, fields: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = findings(*_without(name, monkeypatch))
    assert [(finding.code, finding.severity) for finding in found] == [("ATT104", Severity.ERROR)] * places
    for finding in found:
        assert "position factor missing" in finding.message
        assert fields in finding.message


@pytest.mark.parametrize(
    ("positions", "words"),
    [
        (lambda length: torch.arange(length) + 1, "one position too late"),
        (lambda length: (torch.arange(length) - 1).clamp(min=0), "one position too early"),
        (lambda length: 3 * torch.arange(length), "is another one"),
    ],
)
def test_positions_that_are_off_are_named(
    positions: Callable[[int], Tensor], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.ministral3 import modeling_ministral3

    plain = modeling_ministral3.get_llama_4_attn_scale
    monkeypatch.setattr(
        modeling_ministral3, "get_llama_4_attn_scale", lambda given, *rest: plain(positions(given.shape[-1])[None], *rest)
    )
    found = findings(*model_of("ministral3"))
    assert [finding.code for finding in found] == ["ATT104"] * 2
    assert all(words in finding.message for finding in found)


def test_a_constant_mistake_beside_a_right_curve_is_the_constant_one() -> None:
    model, inputs = model_of("llama4")
    model.model.layers[0].self_attn.scaling = 1.0
    (finding,) = findings(model, inputs)
    assert (finding.code, finding.severity) == ("ATT101", Severity.ERROR)


def test_a_wrong_scale_goes_before_a_factor_that_is_missing_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = _without("llama4", monkeypatch)
    model.model.layers[0].self_attn.scaling = HIDDEN**-0.5
    (finding,) = findings(model, inputs)
    assert (finding.code, finding.severity) == ("ATT103", Severity.ERROR)


def test_positions_too_short_to_show_the_factor_are_told() -> None:
    model, inputs = made(BY_NAME["llama4"], floor_scale=8192)
    report = attemper.check(model, dict(inputs))
    assert not [finding for finding in report.findings if finding.code.startswith("ATT1")]
    (note,) = (note for note in report.notes if "factor by position" in note)
    assert "is 1 at all 11 positions of these inputs" in note
    model, inputs = model_of("llama4")
    assert not [note for note in attemper.check(model, dict(inputs)).notes if "factor by position was not seen" in note]


def hand_made(scale: float | Tensor, query: Operand, kind: str, **config: Any) -> Any:
    model = nn.Module()
    model.config = SimpleNamespace(model_type=kind, **config)
    scaling = Scaling(head_dim=10, heads=3, scale=scale, query=query, queries=7)
    call = SimpleNamespace(module="", call=0, scaling=scaling, queries=7)
    return SimpleNamespace(model=model, config=model.config, calls=[call], thresholds=DEFAULTS, misread=())


LLAMA4 = {"attn_temperature_tuning": True, "attn_scale": 0.3, "floor_scale": 2, "no_rope_layers": [0]}


def _layer(found: Any) -> Any:
    found.model.layer_idx = 0
    return found


def test_a_curve_that_is_passed_as_the_scale_counts_like_one_on_the_query() -> None:
    rule = scales.Llama4(0.3, 2)
    curve = torch.as_tensor(rule.factor(scales.LogitShape(10, 3, queries=7, keys=7)))[None]
    assert scale_findings(_layer(hand_made(curve, Operand(), "llama4_text", **LLAMA4))) == ()
    (missing,) = scale_findings(_layer(hand_made(10**-0.5, Operand(), "llama4_text", **LLAMA4)))
    assert "position factor missing" in missing.message
    both = Operand(None, "by position", curve[0] * 10**0.5)
    (twice,) = scale_findings(_layer(hand_made(curve, both, "llama4_text", **LLAMA4)))
    assert "is applied twice" in twice.message


def test_a_curve_that_the_rule_does_not_know_is_a_warning() -> None:
    curve = torch.linspace(1, 2, 7)
    (finding,) = scale_findings(hand_made(10**-0.5 * curve[None, None], Operand(), "llama"))
    assert (finding.code, finding.severity) == ("ATT104", Severity.WARNING)
    assert "differs by position" in finding.message
    # One sequence alone: a norm over all heads looks the same, as it does where sequences differ.
    assert scale_findings(hand_made(10**-0.5, Operand(None, "by position", curve[None]), "llama")) == ()
    assert scale_findings(hand_made(10**-0.5, Operand(None, "by position", torch.stack([curve, curve.flip(0)])), "llama")) == ()
    assert len(scale_findings(hand_made(10**-0.5, Operand(None, "by position", curve.expand(2, 7)), "llama"))) == 1


def test_a_query_that_was_not_followed_is_told_and_not_judged() -> None:
    hidden = _layer(hand_made(10**-0.5, Operand(None, "unknown"), "llama4_text", **LLAMA4))
    assert scale_findings(hidden) == ()
    (note,) = position_notes(hidden)
    assert "could not be followed" in note


def test_which_layers_have_a_factor() -> None:
    config = SimpleNamespace(**LLAMA4 | {"no_rope_layers": [1, 0]})
    assert of("llama4_text", config, 0) is None
    assert isinstance(of("llama4_text", config, 1), ByPosition)
    assert of("llama", config, 1) is None
    assert of("llama4_text", SimpleNamespace(**vars(config) | {"attn_temperature_tuning": False}), 1) is None


def stretched(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    width = {"head_dim": 8} if name == "glm4" else {"hidden_size": 32}  # an even number of dimensions is turned
    return build(name, rope_parameters=YARN | {"partial_rotary_factor": 0.5}, **width)


def rotaries(model: nn.Module) -> list[nn.Module]:
    found = [module for module in model.modules() if hasattr(module, "attention_scaling")]
    assert found
    return found


@pytest.mark.parametrize("name", ["gpt_neox", "phi", "glm4"])
@pytest.mark.parametrize(
    ("power", "words"),
    [
        (1.0, ""),
        (0.0, "yarn attention factor squared = 1.4591 is missing"),
        (0.5, "yarn attention factor = 1.2079 is applied once instead of twice"),
        (2.0, "yarn attention factor squared = 1.4591 is applied twice"),
    ],
)
def test_a_stretched_rope_that_turns_a_part_is_judged_on_that_part(name: str, power: float, words: str) -> None:
    model, inputs = stretched(name)
    for rotary in rotaries(model):
        rotary.attention_scaling = rotary.attention_scaling**power
    found = findings(model, inputs)
    assert bool(found) == bool(words)
    for finding in found:
        assert (finding.code, finding.severity) == ("ATT104", Severity.ERROR)
        assert words in finding.message
        assert "in the part of the width that RoPE turns" in finding.message


@pytest.mark.parametrize("name", ["gpt_neox", "phi"])
def test_a_scale_beside_a_part_that_is_turned_is_judged_by_itself(name: str) -> None:
    model, inputs = stretched(name)
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), float):
            module.scaling = 1.0
    found: tuple[Finding, ...] = findings(model, inputs)
    assert {(finding.code, finding.severity) for finding in found} == {("ATT101", Severity.ERROR)}
