"""The numbers that decide findings: each is described, each decides what it says."""

import math
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import attemper
from attemper.checker.codes import BY_CODE
from attemper.checker.scale_rules import Design
from attemper.checker.scale_verdict import Applied, judge
from attemper.checker.thresholds import DEFAULTS, THRESHOLDS, Thresholds, used_by
from attemper.errors import ArgumentError

FAULTS = "attemper.examples.faults"


@pytest.mark.parametrize("threshold", THRESHOLDS, ids=lambda each: each.name)
def test_each_says_what_it_is(threshold: object) -> None:
    meaning = threshold.meaning  # pyrefly: ignore
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", threshold.name)  # pyrefly: ignore
    assert meaning.words.endswith(".")
    assert meaning.unit
    assert meaning.source
    assert meaning.codes
    assert set(meaning.codes) <= set(BY_CODE)


def test_a_rule_that_speaks_of_a_threshold_has_one() -> None:
    for code, rule in BY_CODE.items():
        for name in re.findall(r"threshold ([a-z-]+)", rule.measured):
            assert name in {each.name for each in used_by(code)}, code


@pytest.mark.parametrize(
    ("model", "code", "name", "value", "found"),
    [
        ("large_logits", "ATT202", "large-logit", 311.0, True),
        ("large_logits", "ATT202", "large-logit", 312.0, False),
        ("coarse_logits", "ATT205", "sixteen-bit-error", 0.4, True),
        ("coarse_logits", "ATT205", "sixteen-bit-error", 0.6, False),
        ("float8_range", "ATT206", "eight-bit-error", 0.4, True),
        ("float8_range", "ATT206", "eight-bit-error", 0.55, False),
        ("saturated_head", "ATT301", "saturated-share", 0.99, True),
        ("large_logits", "ATT301", "saturated-share", 0.9, False),
        ("large_logits", "ATT301", "fewest-rows", 57, False),
        ("sink_head", "ATT302", "sink-weight", 0.81, False),
        ("sink_head", "ATT302", "sink-rows", 1.0, False),
        ("sees_the_future", "ATT402", "leak-roundings", 780.0, True),
        ("sees_the_future", "ATT402", "leak-roundings", 820.0, False),
        ("padding_leaks", "ATT403", "leak-roundings", 120.0, False),
        ("cache_continues_wrongly", "ATT405", "leak-roundings", 500.0, True),
        ("cache_continues_wrongly", "ATT405", "leak-roundings", 600.0, False),
        ("depends_on_batch", "ATT406", "leak-roundings", 400.0, True),
        ("depends_on_batch", "ATT406", "leak-roundings", 4000.0, False),
    ],
)
def test_it_decides(model: str, code: str, name: str, value: float, found: bool) -> None:
    report = attemper.check(f"{FAULTS}:{model}", thresholds={name: value})
    assert (code in {finding.code for finding in report.findings}) is found
    usual = next(each.default for each in THRESHOLDS if each.name == name)
    assert report.notes[-1] == f"thresholds were set: {name} {value:g} (usually {usual:g})"


def test_how_far_a_scale_may_lie() -> None:
    usual = Design(0.5)
    assert judge(Applied(0.5 * (1 + 1e-4)), usual, 4) is not None
    assert judge(Applied(0.5 * (1 + 1e-4)), usual, 4, limits=Thresholds(scale_exact=1e-3)) is None
    assert judge(Applied(0.25, query=2 * 1.02), usual, 4) is not None
    assert judge(Applied(0.25, query=2 * 1.02), usual, 4, limits=Thresholds(scale_measured=0.03)) is None


class Biased(nn.Module):
    """Attention with a bias on the logits.

    Args:
        bias: [29, 29].
    """

    def __init__(self, bias: torch.Tensor) -> None:
        super().__init__()
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (3, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, self.bias)

    def found(self, code: str, **thresholds: float) -> list[str]:
        """The severities of the findings of one code."""
        x = torch.randn(2, 29, 24, generator=torch.Generator().manual_seed(3))
        return [each.severity for each in attemper.check(self, x, select=code, thresholds=thresholds).findings]


def test_what_is_an_offset() -> None:
    shifted = Biased(torch.full((29, 29), 300.0))
    assert shifted.found("ATT202") == ["info"]
    assert shifted.found("ATT202", offset_share=0) == ["warning"]


def test_what_is_at_rest() -> None:
    chosen = (torch.arange(29) >= 24).long()  # 24 of 29 rows choose the first token, 83 %, and the others the second
    for code, strength in (("ATT301", 9.0), ("ATT304", 90.0)):
        resting = Biased(F.one_hot(chosen, 29) * strength)
        assert resting.found(code) == ["warning"]
        assert resting.found(code, at_rest_rows=0.8) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"large-logits": 3}, "thresholds: got 'large-logits'; expected one of scale-exact, "),
        ({"large-logit": -1}, "thresholds.large-logit: got -1; expected a number, 0 or more"),
        ({"large-logit": math.nan}, "thresholds.large-logit: got nan"),
        ({"large-logit": math.inf}, "thresholds.large-logit: got inf"),
        ({"large-logit": True}, "thresholds.large-logit: got True"),
        ({"saturated-share": 1.5}, "thresholds.saturated-share: got 1.5; expected a number from 0 to 1"),
        ([1], r"thresholds: got \[1\]; expected numbers by the names"),
    ],
)
def test_what_cannot_be_one(given: object, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        Thresholds.of(given)  # pyrefly: ignore


def test_names_may_have_hyphens_or_underscores_and_the_rest_stays() -> None:
    assert Thresholds.of({"large-logit": 7}) == Thresholds.of({"large_logit": 7}) == Thresholds(large_logit=7)
    assert Thresholds.of(None) == DEFAULTS
    assert Thresholds.of(Thresholds(sink_rows=0.1)).by_name() == DEFAULTS.by_name() | {"sink-rows": 0.1}
