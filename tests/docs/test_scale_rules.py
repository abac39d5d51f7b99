"""The pages of scale rules: one for each, whose statements are those of the rule and of check."""

import inspect
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from attemper import scales
from attemper.checker.scales_expected import expected_scale
from attemper.scales import LogitShape, Scale
from docs.pages.scale_rule_texts import RULES, Words
from docs.pages.scale_rules import made, parts_of, scale_rule_pages

CALLED_FOR = [words for words in RULES.values() if words.config and not isinstance(made(words.expected), nn.Module)]


def test_every_rule_has_a_page_and_nothing_else_has() -> None:
    assert {rule.__name__ for rule in RULES} == set(scales.__all__) - {"Scale", "LogitShape"}
    pages = scale_rule_pages()
    assert set(pages) == {"index", *(rule.__name__ for rule in RULES)}
    assert all(f"]({rule.__name__}.md)" in pages["index"] for rule in RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_arguments_are_all_there(rule: type[Scale]) -> None:
    _, assumes, arguments = parts_of(rule)
    assert re.split(r"[`, ]+", ", ".join(names for names, _ in arguments)) == (list(inspect.signature(rule).parameters) or [""])
    assert "Args:" not in assumes
    assert "Source:" not in assumes


@pytest.mark.parametrize("words", CALLED_FOR, ids=lambda words: words.expected)
def test_check_calls_for_what_the_page_says(words: Words) -> None:
    module: Any = nn.Module()
    module.config, module.layer_idx = SimpleNamespace(**words.config), words.layer
    expected = expected_scale(module, "", head_dim=64, heads=12)
    assert expected.certain
    assert expected.value is not None
    shape = LogitShape(64, 12, queries=64, keys=64, layer=words.layer)
    by_position = 1.0 if expected.design.position is None else expected.design.position.curve(64)
    factor = torch.as_tensor(made(words.expected).factor(shape), dtype=torch.float64)
    torch.testing.assert_close(factor.flatten(), torch.as_tensor(expected.value * by_position).double().flatten())
    assert made(words.expected).depends_on_position == (expected.design.position is not None)


def test_a_page_says_what_check_finds() -> None:
    pages = scale_rule_pages()
    assert "| 1/√d | 0.125 | [ATT104](../rules/ATT104.md) | the factor mscale^2 = 1.8739 is missing |" in pages["MScale"]
    assert "position factor missing" in pages["Llama4"]
    for words in CALLED_FOR:
        page = pages[type(made(words.expected)).__name__]
        rows = re.findall(r"^\| .* \| \[(ATT\d+)\]\(\.\./rules/ATT\d+\.md\) \|", page, re.MULTILINE)
        assert len(rows) >= 4, words.expected
        assert set(rows) <= {"ATT101", "ATT102", "ATT103", "ATT104"}
        assert "| nothing |" not in page


def test_figures_are_the_rules_own() -> None:
    pages = scale_rule_pages()
    assert "| 64 | 0.125 | 1 |" in pages["InverseSqrt"]
    assert "| 5 | 0.0208333 | 0.02778 |" in pages["InverseLayer"]
    assert "| 8191 | 0.133664 | 1.143 |" in pages["Llama4"]  # 0.125 · (1 + 0.1 ln 2)
