"""Which findings are wanted, where, and how grave they are."""

from typing import Any

import pytest

import attemper
from attemper.checker.selection import Selection, layer_ignores
from attemper.errors import ArgumentError
from attemper.report import Severity
from tests.reports import HOSTILE, finding


@pytest.mark.parametrize(
    ("glob", "module", "fits"),
    [
        ("layers.1.attention", "layers.1.attention", True),
        ("layers.1.*", "layers.1.attention", True),
        ("layers.1.*", "layers.11.attention", False),
        ("*.1.*", "layers.1.attention", True),
        ("layers.[0-2].*", "layers.1.attention", True),
        ("1.*", "layers.1.attention", False),
        ("LAYERS.1.*", "layers.1.attention", False),
        ("*", "", True),
        ("*", HOSTILE, True),
        ("layers", "layers.1.attention", False),
    ],
)
def test_a_glob_fits_whole_names(glob: str, module: str, fits: bool) -> None:
    selection = Selection.of(per_layer_ignores={glob: "ATT301"})
    assert (selection.apply([finding(module=module)]) == ()) is fits
    assert selection.apply([finding("ATT302", module=module)]) != ()
    assert selection.fits_nothing([module]) == (() if fits else (glob,))


def test_several_globs_add_up() -> None:
    selection = Selection.of(per_layer_ignores={"*.1.*": ["ATT302", "ATT2"], "layers.*": "ATT30"})
    assert selection.apply([finding(), finding("ATT302"), finding("ATT202")]) == ()


def test_severities_are_what_the_user_says() -> None:
    selection = Selection.of(severities={"ATT3": "info", "att301": "error"})
    found = selection.apply([finding("ATT302", Severity.WARNING), finding(), finding("ATT202", Severity.INFO)])
    assert [(each.code, each.severity) for each in found] == [("ATT301", "error"), ("ATT202", "info"), ("ATT302", "info")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"per_layer_ignores": {"a.*": "ATT9"}}, r"per_layer_ignores\['a.\*'\]: got 'ATT9'"),
        ({"per_layer_ignores": {"a.*": ""}}, r"per_layer_ignores\['a.\*'\]: got ''; expected one code or more"),
        ({"per_layer_ignores": ["a.*"]}, r"per_layer_ignores: got \['a.\*'\]; expected codes by globs"),
        ({"severities": {"ATT1,ATT2": "info"}}, "severities: got 'ATT1,ATT2'; expected one code"),
        ({"severities": {"": "info"}}, "severities: got ''; expected one code"),
        ({"severities": {"ATT1": "fatal"}}, r"severities\['ATT1'\]: got 'fatal'; expected one of error, warning, info"),
    ],
)
def test_what_cannot_be_one(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        Selection.of(**arguments)


def test_the_option_is_split_at_its_last_colon() -> None:
    assert layer_ignores(["a:b.*:ATT301", "x:ATT1,ATT2", "x:ATT3"]) == {"a:b.*": ["ATT301"], "x": ["ATT1,ATT2", "ATT3"]}


@pytest.mark.parametrize("given", ["layers.*", "layers.*:", ":ATT301", ""])
def test_half_an_option(given: str) -> None:
    with pytest.raises(ArgumentError, match=f"per_layer_ignores: got {given!r}; expected GLOB:CODES".replace("*", r"\*")):
        layer_ignores([given])


def test_a_glob_without_effect_is_told() -> None:
    report = attemper.check(per_layer_ignores={"blocks.[0-3].*": "ATT1", "layers.*": "ATT3"})
    assert "ATT101" not in {each.code for each in report.findings}
    assert "the per-layer ignore 'layers.*' fits no module of this model" in report.notes
