"""Every rule that transformers has is held against it: a tiny model's own eager attention, and ours under the rule."""

import pytest
import torch
from torch import Tensor

import attemper
from attemper import scales
from attemper.scales import LogitShape, Scale
from attemper.scales.table import USES
from tests.scales.huggingface import BYPASSING, CASES, Case, Seen, Weighed, run

transformers = pytest.importorskip("transformers")


class Stretched(scales.Scale):
    """A rule that is 2 % off, to show that a comparison would tell."""

    def __init__(self, rule: Scale) -> None:
        self._rule = rule

    def factor(self, shape: LogitShape) -> float | Tensor:
        return self._rule.factor(shape) * 1.02


def ours(seen: Seen, rule: Scale) -> tuple[Tensor, attemper.RowStats]:
    call = seen.call
    return attemper.attention(
        seen.query,
        seen.key,
        call.value,
        call.attn_mask,
        is_causal=call.is_causal,
        scale=rule,
        enable_gqa=True,
        softcap=call.softcap,
        sinks=call.sinks,
        window=call.window,
        offset=call.offset,
        return_stats=True,
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_models_attention_is_ours_under_its_rule(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = run(case, monkeypatch)
    assert calls
    told = 0.0
    for seen in calls:
        layer = next((int(part) for part in seen.call.module.split(".") if part.isdigit()), 0)
        rule = case.rule.at(layer)
        output, rows = ours(seen, rule)
        shown = rows.count > 0
        error = (output - seen.result)[shown].abs().max()
        # A logit of size z is rounded by a few eps·z, which moves its weight by as much; so are the norms that were compared.
        largest = torch.maximum(rows.max.abs(), rows.min.abs())[shown].max()
        assert error <= 16 * torch.finfo(torch.float32).eps * (1 + largest) * (1 + seen.call.value.abs().max())
        told = max(told, ((ours(seen, Stretched(rule))[0] - seen.result)[shown].abs().max() / error.clamp(min=1e-9)).item())
    assert told > 20, "a factor that is 2 % off would not have been seen"


@pytest.mark.parametrize("name", BYPASSING)
def test_the_weights_of_a_model_that_bypasses_every_seam_are_ours_under_its_rule(name: str) -> None:
    rule, weigh = BYPASSING[name]
    with torch.no_grad():
        seen = weigh()
        error = (weights(seen, rule) - seen.weights).abs().max()
        assert error <= 2e-5
        assert (weights(seen, Stretched(rule)) - seen.weights).abs().max() > 20 * error


def weights(seen: Weighed, rule: Scale) -> Tensor:
    """Ours: what attention gives for values that are the unit vectors."""
    tokens = seen.key.shape[-2]
    units = torch.eye(tokens).expand(*seen.key.shape[:2], tokens, tokens)
    bias = torch.zeros_like(seen.weights).add(seen.bias).masked_fill(seen.weights == 0, -torch.inf)
    return attemper.attention(seen.query, seen.key, units, bias, scale=rule, enable_gqa=True)


def test_inkling2_multiplies_q_by_our_factor() -> None:
    from transformers.models.inkling2.modeling_inkling2 import Inkling2LogScale

    config = transformers.Inkling2TextConfig(log_scaling_alpha=0.3, log_scaling_n_floor=4)
    query = torch.randn(2, 13, 3, 5)  # [batch, queries, heads, d]
    scaled = Inkling2LogScale(config)(query, torch.arange(7, 20).expand(2, 13))
    factor = scales.Inkling(0.3, 4, base=scales.Constant()).factor(LogitShape(5, 3, queries=13, keys=20, offset=7))
    assert isinstance(factor, Tensor)
    assert factor.std() > 0
    torch.testing.assert_close(scaled, query * factor[0, :, None, None])


def test_the_table_of_the_documents_names_the_cases_that_hold_it() -> None:
    rules = {case.name: case.rule for case in CASES} | {name: rule for name, (rule, _) in BYPASSING.items()}
    rules["inkling2"] = scales.Inkling()
    named = [(name, use.rule) for use in USES for name in use.held]
    assert len({name for name, _ in named}) == len(named)
    assert {name: rule.__name__ for name, rule in named} == {name: type(rule).__name__ for name, rule in rules.items()}
    assert {use.rule.__name__ for use in USES} == set(scales.__all__) - {"Scale", "LogitShape"}
    assert all(use.formula and use.source for use in USES)
