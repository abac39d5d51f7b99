"""Each rule against its formula written out in Python floats, its expected variance against a measurement, and its refusals."""

import copy
import inspect
import math
import pickle
import re
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attemper import scales
from attemper.errors import ArgumentError
from attemper.scales import LogitShape, Scale
from tests.running import run
from tests.scales.examples import EXAMPLES, SHAPE, examples

D, LAYER = SHAPE.head_dim, SHAPE.layer
PLACES = [SHAPE.offset + query for query in range(SHAPE.queries)]
MSCALE = 0.1 * math.log(40) + 1


def factors(rule: Scale, shape: LogitShape = SHAPE) -> Tensor:
    """[heads, queries], float64."""
    factor = torch.as_tensor(rule.factor(shape), dtype=torch.float64).detach()
    return (factor.unsqueeze(-1) if factor.ndim == 1 else factor).expand(shape.heads, shape.queries)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (scales.Constant(), 1.0),
        (scales.Constant(-0.7), -0.7),
        (scales.InverseSqrt(), D**-0.5),
        (scales.Inverse(), 1 / D),
        (scales.Inverse(8), 8 / D),
        (scales.Sqrt(), D**0.5),
        (scales.InverseSqrtTerms(), (3 * D) ** -0.5),
        (scales.InverseSqrtTerms(0.5), (D / 2) ** -0.5),
        (scales.QueryPreAttnScalar(17), 17**-0.5),
        (scales.AttentionMultiplier(0.0625), 0.0625),
        (scales.InverseLayer(), D**-0.5 / 3),
        (scales.InverseLayer().at(4), D**-0.5 / 5),
        (scales.InverseLayer(scales.InverseLayer()).at(4), D**-0.5 / 25),
        (scales.Yarn(40.0), D**-0.5 * MSCALE**2),
        (scales.Yarn(0.5), D**-0.5),
        (scales.Yarn(40.0, 0.7, 1.1), D**-0.5 * ((0.07 * math.log(40) + 1) / (0.11 * math.log(40) + 1)) ** 2),
        (scales.Yarn(40.0, 0.7, 0.7), D**-0.5),
        (scales.Yarn(40.0, 0.7), D**-0.5 * MSCALE**2),
        (scales.Yarn(40.0, attention_factor=1.25), D**-0.5 * 1.25**2),
        (scales.LongRope(32.0, 4096), D**-0.5 * (1 + 5 / 12)),
        (scales.LongRope(1.0, 4096), D**-0.5),
        (scales.MScale(40.0), D**-0.5 * MSCALE**2),
        (scales.MScale(40.0, 0.9), D**-0.5 * (0.09 * math.log(40) + 1) ** 2),
        (scales.MScale(1.0), D**-0.5),
        (scales.Critical(1.5, causal=False), 1.5 * math.log(11)),
        (scales.Critical.at_similarity(0.2, causal=False), math.log(11) / 0.8),
        (scales.Learned(initial=1.3), D**-0.5 * 1.3),
        (scales.Cosine(3), 10.0),
        (scales.LogLength(3, initial=0.5, causal=False), D**-0.5 * 0.5 * math.log(11)),
    ],
    ids=str,
)
def test_one_number(rule: Scale, expected: float) -> None:
    torch.testing.assert_close(factors(rule), torch.full((3, 7), expected, dtype=torch.float64), rtol=1e-6, atol=0)
    if not isinstance(rule, nn.Module):
        assert rule.factor(SHAPE) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(
    ("rule", "formula"),
    [
        (scales.Llama4(0.3, 3), lambda p: D**-0.5 * (1 + 0.3 * math.log1p(math.floor((p + 1) / 3)))),
        (scales.Ministral3(0.3, 3), lambda p: D**-0.5 * (1 + 0.3 * math.log(1 + math.floor(p / 3)))),
        (scales.Inkling(0.4, 6.5), lambda p: (1 + 0.4 * math.log(max((p + 1) / 6.5, 1))) / D),
        (scales.Beam(0.4, 3.0), lambda p: D**-0.5 * (1 + (p + 1) / 3) ** 0.4),
        (scales.Critical(1.5), lambda p: 1.5 * math.log(p + 1)),
        (scales.LogLength(initial=0.5), lambda p: D**-0.5 * 0.5 * math.log(p + 1)),
        (scales.LogLength(3, initial=0.5), lambda p: D**-0.5 * 0.5 * math.log(p + 1)),
        (scales.InverseLayer(scales.Llama4(0.3, 3)), lambda p: D**-0.5 / 3 * (1 + 0.3 * math.log1p(math.floor((p + 1) / 3)))),
    ],
    ids=lambda given: str(given) if isinstance(given, Scale) else "",
)
def test_by_position(rule: Scale, formula: Any) -> None:
    expected = torch.tensor([[formula(place) for place in PLACES]] * 3, dtype=torch.float64)
    assert expected.std() > 0
    torch.testing.assert_close(factors(rule), expected, rtol=1e-6, atol=0)
    assert rule.depends_on_position


def test_positions_start_at_the_offset() -> None:
    for rule in EXAMPLES:
        if rule.depends_on_position:
            whole = factors(rule, SHAPE._replace(queries=11, offset=0))
            torch.testing.assert_close(factors(rule), whole[:, 4:], rtol=0, atol=0)


def test_no_row_sees_more_keys_than_there_are() -> None:
    rule = scales.LogLength(initial=1.0, base=scales.Constant())
    beyond = factors(rule, LogitShape(5, 1, queries=4, keys=2, offset=-1))
    torch.testing.assert_close(beyond[0].exp(), torch.tensor([1.0, 1.0, 2.0, 2.0], dtype=torch.float64), rtol=1e-6, atol=0)
    assert factors(rule, LogitShape(5, 1, queries=2, keys=0)).eq(0).all()


def test_llama4_steps_where_its_config_says() -> None:
    temperature = factors(scales.Llama4(0.1, 8192, base=scales.Constant()), LogitShape(5, 1, queries=3, keys=9000, offset=8190))
    assert temperature[0, 0] == 1
    assert temperature[0, 1].item() == pytest.approx(1 + 0.1 * math.log(2), rel=1e-6)


def test_a_head_has_its_own_parameter_and_bound() -> None:
    rule = scales.Learned(3, lowest=0.5, highest=2.0)
    rule.log_factor.data = torch.tensor([0.3, 9.0, -9.0])
    expected = torch.tensor([math.exp(0.3), 2.0, 0.5], dtype=torch.float64) * D**-0.5
    torch.testing.assert_close(factors(rule)[:, 0], expected, rtol=1e-6, atol=0)
    factor = rule.factor(SHAPE)
    assert isinstance(factor, Tensor)
    factor.sum().backward()
    assert rule.log_factor.grad is not None
    assert (rule.log_factor.grad != 0).tolist() == [True, False, False]
    cosine = scales.Cosine(2)
    cosine.logit_scale.data = torch.tensor([math.log(100) - 0.1, math.log(100) + 0.1])
    assert factors(cosine, SHAPE._replace(heads=2))[:, 0].tolist() == pytest.approx([100 * math.exp(-0.1), 100], rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_factor_is_never_narrower_than_float32(dtype: torch.dtype) -> None:
    for rule in examples():
        if isinstance(rule, nn.Module):
            factor = rule.to(dtype).factor(SHAPE)
            assert isinstance(factor, Tensor)
            assert factor.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("rule", EXAMPLES, ids=str)
def test_the_variance_is_what_is_measured(rule: Scale) -> None:
    """Entries of q and k uniform with mean 0 and variance 1: nothing rests on normality."""
    draws, generator = 400, torch.Generator().manual_seed(17)
    query, key = (
        torch.empty(draws, SHAPE.heads, length, D, dtype=torch.float64).uniform_(-(3**0.5), 3**0.5, generator=generator)
        for length in (SHAPE.queries, SHAPE.keys)
    )
    if rule.unit_operands:
        query, key = nn.functional.normalize(query, dim=-1), nn.functional.normalize(key, dim=-1)
    squares = (query @ key.mT * factors(rule).unsqueeze(-1)).square().flatten(1).mean(1)  # logits have mean 0
    error = squares.std() / draws**0.5
    assert 0 < error < 0.03 * squares.mean()
    assert abs(squares.mean() - rule.logit_variance(SHAPE)) < 4 * error


def test_variances_that_people_quote() -> None:
    assert scales.InverseSqrt().logit_variance(SHAPE) == pytest.approx(1)
    assert scales.Sqrt().logit_variance(SHAPE) == pytest.approx(1)
    assert scales.Constant().logit_variance(SHAPE) == D
    assert scales.Inverse().logit_variance(SHAPE) == pytest.approx(1 / D)
    assert scales.InverseSqrtTerms(3).logit_variance(SHAPE) == pytest.approx(1 / 3)
    assert scales.Cosine(3).logit_variance(SHAPE) == pytest.approx(100 / D)


@pytest.mark.parametrize("rule", EXAMPLES, ids=str)
def test_the_layer_can_be_bound(rule: Scale) -> None:
    bound, same = rule.at(6), SHAPE._replace(layer=6)
    if rule == scales.InverseLayer(scales.Yarn(40.0), layer=5):
        rule = scales.InverseLayer(scales.Yarn(40.0))  # bound once, and now anew
    torch.testing.assert_close(factors(bound, SHAPE._replace(layer=None)), factors(rule, same), rtol=0, atol=0)
    if isinstance(rule, nn.Module):
        assert isinstance(bound, nn.Module)
        assert all(one is other for one, other in zip(rule.parameters(), bound.parameters(), strict=True))
    else:
        hash(bound)


def test_a_rule_that_needs_the_layer_says_so() -> None:
    rule = scales.Learned(base=scales.InverseLayer())
    with pytest.raises(ArgumentError, match=r"layer: got None; expected .* InverseLayer needs: bind it with rule\.at\(layer\)"):
        rule.factor(SHAPE._replace(layer=None))


def test_the_state_of_a_rule_is_its_parameter() -> None:
    rule, other = scales.LogLength(3, initial=0.7), scales.LogLength(3)
    assert list(rule.state_dict()) == ["slope"]
    other.load_state_dict(rule.state_dict())
    torch.testing.assert_close(factors(other), factors(rule), rtol=0, atol=0)
    other.slope.data.fill_(9.0)
    other.reset_parameters()
    assert other.slope.tolist() == pytest.approx([0.43] * 3)
    model = nn.ModuleDict({"scale": scales.Cosine(3)})
    assert [name for name, _ in model.named_parameters()] == ["scale.logit_scale"]


@pytest.mark.parametrize("rule", EXAMPLES, ids=str)
def test_a_rule_survives_copying_and_pickling(rule: Scale) -> None:
    for other in (copy.deepcopy(rule), pickle.loads(pickle.dumps(rule))):
        torch.testing.assert_close(factors(other), factors(rule), rtol=0, atol=0)
        assert str(other) == str(rule)
        if not isinstance(rule, nn.Module):
            assert other == rule


def test_a_fixed_rule_cannot_be_changed() -> None:
    with pytest.raises(AttributeError, match="cannot assign to field 'value'"):
        setattr(scales.Constant(2.0), "value", 3.0)  # noqa: B010


def test_only_these_depend_on_the_position() -> None:
    found = {type(rule).__name__ for rule in EXAMPLES if rule.depends_on_position}
    assert found == {"Llama4", "Ministral3", "Inkling", "Beam", "Critical", "LogLength", "Learned"}
    assert not scales.Learned(3).depends_on_position
    assert scales.Learned(3, base=scales.Llama4()).depends_on_position
    assert scales.InverseLayer(scales.Beam()).depends_on_position


def test_only_these_are_meant_for_unit_operands() -> None:
    assert {type(rule).__name__ for rule in EXAMPLES if rule.unit_operands} == {"Sqrt", "Cosine", "Critical", "Yarn"}
    assert scales.Learned(base=scales.Sqrt()).unit_operands
    assert not scales.Yarn(4.0).unit_operands


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: scales.Constant(NAN), "value: got nan; expected a finite number"),
        (lambda: scales.Constant("1"), "value: got '1'; expected a finite number"),
        (lambda: scales.Constant(True), "value: got True; expected a finite number"),
        (lambda: scales.Inverse(0.0), r"multiplier: got 0\.0; expected a finite number above 0"),
        (lambda: scales.InverseSqrtTerms(-3), "terms: got -3; expected a finite number above 0"),
        (lambda: scales.QueryPreAttnScalar(0), "scalar: got 0; expected a finite number above 0"),
        (lambda: scales.AttentionMultiplier(INF), "multiplier: got inf; expected a finite number"),
        (lambda: scales.InverseLayer(0.5), r"base: got 0\.5; expected a rule of attemper\.scales"),
        (lambda: scales.InverseLayer(layer=-1), "layer: got -1; expected a whole number from 0 on"),
        (lambda: scales.InverseLayer().at(1.5), r"layer: got 1\.5; expected a whole number from 0 on"),
        (
            lambda: scales.InverseLayer(scales.Learned()),
            "base: got Learned; expected a rule without parameters; nest them",
        ),
        (lambda: scales.Yarn(0.0), r"stretch: got 0\.0; expected a finite number above 0"),
        (lambda: scales.Yarn(4.0, mscale=-1.0), r"mscale: got -1\.0; expected a finite number above 0"),
        (lambda: scales.Yarn(4.0, attention_factor=0), "attention_factor: got 0; expected a finite number above 0"),
        (lambda: scales.LongRope(4.0, 1), "original_length: got 1; expected a length above 1"),
        (lambda: scales.MScale(-4.0), r"stretch: got -4\.0; expected a finite number above 0"),
        (lambda: scales.Llama4(length=0), "length: got 0; expected a whole number from 1 on"),
        (lambda: scales.Llama4(length=8192.0), r"length: got 8192\.0; expected a whole number from 1 on"),
        (lambda: scales.Ministral3(beta=INF), "beta: got inf; expected a finite number"),
        (lambda: scales.Inkling(length=-2), "length: got -2; expected a finite number above 0"),
        (lambda: scales.Beam(NAN), "exponent: got nan; expected a finite number"),
        (lambda: scales.Critical(-1), "gamma: got -1; expected a finite number above 0"),
        (lambda: scales.Critical(causal=1), "causal: got 1; expected True or False"),
        (lambda: scales.Critical.at_similarity(1.0), r"similarity: got 1\.0; expected a cosine between different tokens"),
        (lambda: scales.Learned(0), "heads: got 0; expected a whole number from 1 on"),
        (lambda: scales.Learned(initial=0.001), r"initial: got 0\.001; expected a number from lowest=0\.01 to highest=100\.0"),
        (lambda: scales.Learned(base=None), "base: got None; expected a rule of attemper.scales"),
        (lambda: scales.Cosine(3, initial=101), r"initial: got 101; expected a number up to highest=100\.0"),
        (lambda: scales.LogLength(3, initial=NAN), "initial: got nan; expected a finite number"),
        (lambda: scales.LogLength(5).factor(SHAPE), "heads: got 3 heads of query; expected 5, for which this LogLength was made"),
    ],
)
def test_what_does_not_fit_is_refused(build: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        build()


RULES = [getattr(scales, name) for name in scales.__all__ if name not in ("Scale", "LogitShape")]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_states_its_formula_assumption_arguments_and_source(rule: type[Scale]) -> None:
    doc = inspect.getdoc(rule) or ""
    assert doc == inspect.cleandoc(rule.__doc__ or "")
    assert re.match(r"\S.{0,60}: ", doc), "the first line begins with the formula and a colon"
    assert "\nAssumes " in doc
    assert re.search(r"\nSource: .*(arXiv|transformers)", doc, re.DOTALL)
    takes = [name for name in inspect.signature(rule).parameters if name != "self"]
    assert not [name for name in takes if not re.search(rf"\b{name}(, \w+)*:", doc)]


def test_every_rule_has_an_example() -> None:
    assert {type(rule) for rule in EXAMPLES} == set(RULES)


def test_importing_attemper_loads_no_rule() -> None:
    code = "import sys, attemper; print(*sorted(name for name in sys.modules if name.startswith('attemper.scales')))"
    assert run(sys.executable, "-c", code).split() == ["attemper.scales", "attemper.scales.base"]


def test_an_unknown_rule_is_told_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"'attemper\.scales' has no attribute 'Softmax'; it has AttentionMultiplier, Beam"):
        scales.Softmax  # noqa: B018
    assert set(dir(scales)) == set(scales.__all__)
