"""The formulas that pages print come to what the code computes."""

import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from attemper import RowStats
from attemper.scales import LogitShape, Scale
from docs.pages.measured_statistics import value_of
from docs.pages.scale_rule_texts import RULES
from docs.pages.scale_rules import made
from docs.pages.statistic_texts import STATISTICS, Statistic
from tests.docs.latex_value import value

D, LAYER, POSITION = 67, 5, 140_000
SHAPE = LogitShape(D, heads=1, queries=1, keys=POSITION + 1, offset=POSITION, layer=LAYER)
# How the letters of a rule's formula are called in the code.
LETTERS = {
    "Constant": {"c": "value"},
    "Inverse": {"m": "multiplier"},
    "InverseSqrtTerms": {"n": "terms"},
    "QueryPreAttnScalar": {"a": "scalar"},
    "AttentionMultiplier": {"a": "multiplier"},
    "Yarn": {"s": "stretch"},
    "LongRope": {"s": "stretch", "n_0": "original_length"},
    "MScale": {"s": "stretch", "w": "mscale_all_dim"},
    "Llama4": {r"\beta": "beta", "L": "length"},
    "Ministral3": {r"\beta": "beta", "L": "length"},
    "Inkling": {r"\alpha": "alpha", "L": "length"},
    "Beam": {"a": "exponent", "L": "length"},
    "Cosine": {"s": "logit_scale", "b": "highest"},
    "LogLength": {"s": "slope"},
    "Critical": {r"\gamma": "gamma"},
    "Learned": {r"\theta": "log_factor", "a": "lowest", "b": "highest"},
}


def number(thing: Any) -> float:
    return float(torch.as_tensor(thing).detach().flatten()[0])


@pytest.mark.parametrize("call", [call for words in RULES.values() for call in words.calls])
def test_the_formulas_of_a_scale_rule(call: str) -> None:
    rule = made(call).at(LAYER)
    words = RULES[type(rule)]
    names = {letter: number(getattr(rule, name)) for letter, name in LETTERS.get(type(rule).__name__, {}).items()}
    names |= {"d": D, "l": LAYER, "p": POSITION, "e": math.e}
    if isinstance(base := getattr(rule, "base", None), Scale):
        names["f_0"] = number(base.factor(SHAPE))
    names.setdefault("n", POSITION + 1)
    formula, *further = re.split(r",\s*\\qquad", words.formula)
    for each in further:
        letter, _, text = each.strip().partition(" = ")
        if letter != r"\gamma_c":
            names[letter] = value(text, names)
    factor = value(formula.partition(" = ")[2], names)
    assert factor == pytest.approx(number(rule.factor(SHAPE)), rel=1e-5)
    names["f"] = names["f_p"] = factor
    text = words.variance.partition(" = ")[0].partition(r"\quad")[0]
    assert value(text, names) == pytest.approx(rule.logit_variance(SHAPE), rel=1e-5)


def test_the_edge_of_the_critical_rule() -> None:
    _, text = re.split(r"\\gamma_c = ", RULES[type(made("Critical()"))].formula)
    assert value(text, {r"\rho": 0.6}) == pytest.approx(number(made("Critical.at_similarity(0.6)").gamma))


@pytest.mark.parametrize(
    "statistic", [each for each in STATISTICS if each.name not in {"count", "saturated"}], ids=lambda x: x.name
)
def test_the_formula_of_a_statistic(statistic: Statistic) -> None:
    u = torch.randn(1, 1, 41, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 20
    rows = RowStats.from_logits(u * 0.125, products=u)
    z = (u * 0.125).numpy().flatten()
    p = np.exp(z) / np.exp(z).sum()
    names = {"u_j": u.numpy().flatten(), "z_j": z, "p_j": p, "n": float(len(z)), r"\bar z": z.mean(), "e": math.e}
    names |= {
        "p_2": (p**2).sum(),
        "p_3": (p**3).sum(),
        "H": -(p * np.log(p)).sum(),
        r"\headroom": 65504 / np.abs(u.numpy()).max(),
    }
    names |= {r"\max": z.max(), r"\lse": np.log(np.exp(z).sum())}
    text = statistic.formula.replace(r"\text{largest finite number}", "65504").partition(r"\quad")[0].rstrip(" ,")
    text = text.replace(r"e^{\max - ", r"e^{\largest - ").replace(r"\operatorname{argmax}", r"\argmax")
    names[r"\largest"] = z.max()
    sides = [re.sub(r"\\lVert.*", "", side).strip() for side in text.split(" = ")]
    right = [value(side, names) for side in sides if side not in {"", "H", "p_2", "p_3", r"\bar z", r"\sigma^2", r"\mathrm{lse}"}]
    assert right
    for each in right:
        assert each == pytest.approx(number(value_of(rows, statistic)), rel=1e-6, abs=1e-9)
