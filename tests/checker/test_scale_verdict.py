import re
from dataclasses import replace

import pytest
import torch

from attemper import scales
from attemper.checker.scale_positions import ByPosition
from attemper.checker.scale_rules import Design, Factor
from attemper.checker.scale_verdict import MEASURED, Applied, effective_scale, judge
from attemper.report import Severity

D, MODEL = 13, 91  # no power of one is near a power of the other
USUAL = Design(D**-0.5)
PRESCALED = Design(D**-0.5, query=D**-0.5)
UNSCALED = Design(1.0)
MLA = Design(D**-0.5, factors=(Factor("mscale^2", 1.37**2, root="mscale"),))
LAYER = Design(D**-0.5, factors=(Factor("1/(layer+1)", 1 / 4),))
YARN = Design(D**-0.5, factors=(Factor("yarn attention factor squared", 1.2**2),), query=1.2, key=1.2)


@pytest.mark.parametrize(
    ("design", "applied"),
    [
        (USUAL, Applied(D**-0.5)),
        (USUAL, Applied(1.0, query=D**-0.5)),
        (USUAL, Applied(1.0, query=D**-0.25, key=D**-0.25 * 1.004)),
        (USUAL, Applied(D**-0.5, query=None, key=None)),
        (USUAL, Applied(1.0, query=D**-0.5, query_norm=True, key_norm=True)),
        (USUAL, Applied(D**-0.5, query=None, query_norm=True, key=None, key_norm=True)),
        (PRESCALED, Applied(1.0, query=None)),
        (PRESCALED, Applied(1.0, query=D**-0.5 * 0.997)),
        (PRESCALED, Applied(D**-0.5)),
        (UNSCALED, Applied(1.0)),
        (UNSCALED, Applied(1.0, query_norm=True, key_norm=True)),
        (MLA, Applied(D**-0.5 * 1.37**2, query=None, key=None)),
        (YARN, Applied(D**-0.5, query=1.2, key=1.2)),
        (YARN, Applied(D**-0.5, query=None, key=None)),
        (replace(USUAL, position=ByPosition("temperature", scales.Llama4(base=scales.Constant()))), Applied(D**-0.5, query=1.35)),
        (Design(None), Applied(0.3)),
    ],
)
def test_what_the_architecture_calls_for_gives_no_verdict(design: Design, applied: Applied) -> None:
    assert judge(applied, design, D, widths={MODEL}) is None


@pytest.mark.parametrize(
    ("design", "applied", "code", "cause"),
    [
        (USUAL, Applied(1.0), "ATT101", "no scale"),
        (PRESCALED, Applied(1.0, query=1.0), "ATT101", "no scale"),
        (MLA, Applied(1.37**2), "ATT101", r"only the mscale\^2 is applied"),
        (MLA, Applied(1.0), "ATT101", "no scale"),
        (USUAL, Applied(D**-0.5, query=D**-0.5), "ATT102", "once to q or k"),
        (PRESCALED, Applied(D**-0.5, query=D**-0.5), "ATT102", "once to q or k"),
        (PRESCALED, Applied(D**-0.5, query=None), "ATT102", "twice"),
        (USUAL, Applied(1 / D), "ATT102", "twice"),
        (MLA, Applied(1.37**2 / D), "ATT102", "twice"),
        (Design(1.0, folded=True), Applied(D**-0.5), "ATT102", "initialised"),
        (USUAL, Applied(MODEL**-0.5), "ATT103", str(MODEL)),
        (MLA, Applied(MODEL**-0.5 * 1.37**2), "ATT103", str(MODEL)),
        (MLA, Applied(D**-0.5), "ATT104", r"mscale\^2 = 1.8769 is missing"),
        (MLA, Applied(D**-0.5 * 1.37), "ATT104", "mscale = 1.37 is applied once"),
        (LAYER, Applied(D**-0.5), "ATT104", r"1/\(layer\+1\) = 0.25 is missing"),
        (YARN, Applied(D**-0.5, query=1.0, key=1.0), "ATT104", "yarn attention factor squared"),
        (UNSCALED, Applied(D**-0.5), "ATT104", "rule of the architecture ignored"),
        (Design(0.015), Applied(D**-0.5), "ATT104", "rule of the architecture ignored"),
        (USUAL, Applied(D**0.5), "ATT104", "divided by the scale|multiplied by sqrt"),
        (USUAL, Applied(0.2 * D**-0.5), "ATT104", "0.2 times what it should be"),
        (USUAL, Applied(float("nan")), "ATT104", "not a finite number"),
        (USUAL, Applied(0.0), "ATT104", "0 times"),
    ],
)
def test_a_mistake_is_named(design: Design, applied: Applied, code: str, cause: str) -> None:
    verdict = judge(applied, design, D, widths={MODEL})
    assert verdict is not None
    assert (verdict.code, verdict.severity) == (code, Severity.ERROR)
    assert re.search(cause, verdict.cause)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_rounded_scale_is_told_from_a_wrong_one(dtype: torch.dtype) -> None:
    verdict = judge(Applied(torch.tensor(D**-0.5, dtype=dtype).item()), USUAL, D)
    assert verdict is not None
    assert (verdict.code, verdict.severity) == ("ATT104", Severity.INFO)
    assert str(dtype).removeprefix("torch.") in verdict.cause


def test_rounding_in_a_measured_factor_is_not_reported() -> None:
    assert judge(Applied(1.0, query=D**-0.5 * (1 + 0.9 * MEASURED)), USUAL, D) is None
    assert judge(Applied(1.0, query=D**-0.5 * (1 + 1.1 * MEASURED)), USUAL, D) is not None
    small = judge(Applied(D**-0.5 * (1 + 0.9 * MEASURED)), USUAL, D)
    assert small is not None
    assert "0.90%" in small.cause


def test_a_factor_that_is_unknown_counts_as_the_architectures_own() -> None:
    assert effective_scale(Applied(2.0, query=None, key=None), YARN) == pytest.approx(2 * 1.2**2)
    assert effective_scale(Applied(2.0, query=5.0, key=7.0), YARN) == pytest.approx(70.0)


@pytest.mark.parametrize(
    ("applied", "code", "severity"),
    [
        (Applied(1.0), "ATT101", Severity.ERROR),
        (Applied(D**-0.5, query=D**-0.5), "ATT102", Severity.ERROR),
        (Applied(MODEL**-0.5), "ATT103", Severity.ERROR),
        (Applied(1 / D), "ATT104", Severity.WARNING),  # muP's rule
        (Applied(0.05), "ATT104", Severity.WARNING),
        (Applied(1.0, query=None), "ATT101", Severity.WARNING),
    ],
)
def test_an_unknown_architecture_is_judged_with_care(applied: Applied, code: str, severity: Severity) -> None:
    verdict = judge(applied, USUAL, D, certain=False, widths={MODEL})
    assert verdict is not None
    assert (verdict.code, verdict.severity) == (code, severity)


@pytest.mark.parametrize("passed", [1.0, 1 / D, D**0.5, D**-0.5])
def test_norms_make_any_scale_legitimate_where_the_architecture_is_unknown(passed: float) -> None:
    normed = Applied(passed, query_norm=True, key_norm=True)
    assert judge(normed, USUAL, D, certain=False) is None


def test_norms_excuse_nothing_where_the_architecture_is_known() -> None:
    verdict = judge(Applied(1.0, query_norm=True, key_norm=True), USUAL, D)
    assert verdict is not None
    assert verdict.code == "ATT101"


def test_the_ratio_is_what_happens_to_the_logits() -> None:
    verdict = judge(Applied(1.0), USUAL, D)
    assert verdict is not None
    assert verdict.ratio == pytest.approx(D**0.5)
