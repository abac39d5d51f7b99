"""Formulas of the site: MathML without a script."""

import re
from pathlib import Path

import pytest

from tests.running import ROOT, named

nodes = pytest.importorskip("docutils.nodes")
pytest.importorskip("sphinx")

from docs.mathml import mathml  # noqa: E402 - after the test for what it needs
from docs.pages.scale_rule_texts import RULES  # noqa: E402
from docs.pages.statistic_texts import STATISTICS  # noqa: E402

FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<![\\$])\$(?! )([^$\n]+?)(?<! )\$(?!\$)", re.DOTALL)


def converted(tex: str, block: bool = False) -> str:
    return mathml(nodes.math("", tex), block)


def formulas(path: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`\n]+`", "", text)
    return [block or inline for block, inline in FORMULA.findall(text)]


def test_a_formula_is_mathml() -> None:
    assert converted(r"\frac{1}{\sqrt d}").startswith('<math xmlns="http://www.w3.org/1998/Math/MathML">')
    assert "<msqrt>" in converted(r"\frac{1}{\sqrt d}")
    assert "≤" in converted("‖x‖ ≤ 1 · y")


def test_a_name_of_a_function_stands_apart_from_what_it_is_of() -> None:
    assert 'rspace="0.17em">ln</mo>' in converted(r"p \ln p")
    assert 'rspace="0em">ln</mo>' in converted(r"\ln(1 + x)")
    assert 'rspace="0em">ln</mo>' in converted(r"\ln\left(1 + x\right)")


def test_every_formula_of_the_documents_can_be_converted(caplog: pytest.LogCaptureFixture) -> None:
    found = [(named(path), tex) for path in sorted((ROOT / "docs").glob("**/*.md")) for tex in formulas(path)]
    assert len(found) > 20
    found += [(each.name, each.formula) for each in STATISTICS]
    found += [(rule.__name__, tex) for rule, words in RULES.items() for tex in (words.formula, words.variance)]
    for place, tex in found:
        assert "<code>" not in converted(tex), f"{place}: {tex}"


def test_what_cannot_be_converted_is_shown_as_it_is() -> None:
    assert converted(r"\nothing < 1") == r"<code>\nothing &lt; 1</code>"
