"""Heads described as what they do, on one input and on several."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attemper
from attemper.errors import ArgumentError, LoadError
from attemper.report import Finding
from tests.capture.architectures import build

FAULTS = "attemper.examples.faults"
HEADS, TOKENS, WIDTH = 3, 29, 8


class Biased(nn.Module):
    """Attention over one sequence, whose logits are a bias that its input chooses, per head."""

    def forward(self, bias: Tensor) -> Tensor:
        """[batch, heads, tokens, tokens] to [batch, heads, tokens, width]."""
        zero = torch.zeros(*bias.shape[:-1], WIDTH)
        return F.scaled_dot_product_attention(zero, zero, zero, bias)


def bias(*heads: Tensor) -> dict[str, Tensor]:
    return {"bias": torch.stack(heads)[None]}


FLAT = torch.randn(TOKENS, TOKENS, generator=torch.Generator().manual_seed(5))
ITSELF, BEFORE, FIRST = torch.eye(TOKENS), torch.eye(TOKENS).roll(-1, 1), F.one_hot(torch.zeros(TOKENS).long(), TOKENS)
CAUSAL = torch.full((TOKENS, TOKENS), -torch.inf).triu(1)


def found(given: object, code: str, **thresholds: float) -> list[Finding]:
    return [each for each in attemper.check(Biased(), given, thresholds=thresholds).findings if each.code == code]


@pytest.mark.parametrize(
    ("example", "code"), [("uniform_head", "ATT303"), ("dead_head", "ATT304"), ("previous_token_head", "ATT305")]
)
def test_an_example_has_its_fault(example: str, code: str) -> None:
    findings = attemper.check(f"{FAULTS}:{example}").findings
    assert {each.code for each in findings} == {code}
    assert all(each.heads == (0, 1, 2) for each in findings)


def test_one_head_of_three_is_uniform() -> None:
    (finding,) = found(bias(FLAT, 0.1 * FLAT, FLAT), "ATT303")
    assert finding.heads == (1,)
    p = torch.softmax(0.1 * FLAT.double(), -1)
    entropy = float((-(p * p.log()).sum(-1) / torch.tensor(float(TOKENS)).log()).mean())
    assert finding.measured == pytest.approx(entropy, rel=1e-5)
    assert not found(bias(FLAT, 0.1 * FLAT, FLAT), "ATT303", uniform_entropy=entropy + 1e-4)


def test_a_model_that_only_averages_is_told_once() -> None:
    model, inputs = build("llama")
    (finding,) = [each for each in attemper.check(model, dict(inputs)).findings if each.code == "ATT303"]
    assert finding.module == ""
    assert finding.message.startswith("all 8 heads of the model")
    assert finding.message.endswith("normalized entropy is 1.0000 or more, of 1 at most (threshold 0.99).")


class TestDead:
    @pytest.mark.parametrize(("strength", "dead"), [(12.0, True), (10.0, False)])
    def test_gain_decides(self, strength: float, dead: bool) -> None:
        p = torch.softmax(strength * ITSELF.double(), -1)
        assert bool((1 - p.square().sum(-1) < 1e-3).all()) is dead
        heads = [each.heads for each in found(bias(FLAT, strength * ITSELF, FLAT), "ATT304")]
        assert heads == ([(1,)] if dead else [])

    def test_a_saturated_head_with_other_rows_is_not(self) -> None:
        mixed = torch.where(torch.arange(TOKENS)[:, None] < 20, 12.0 * ITSELF, FLAT)
        given = bias(FLAT, mixed, FLAT)
        assert found(given, "ATT304") == []
        assert [each.heads for each in found(given, "ATT301")] == [(1,)]
        assert [each.heads for each in found(given, "ATT304", dead_rows=0.6)] == [(1,)]

    def test_a_head_is_told_once_as_the_graver_of_the_two(self) -> None:
        mixed = torch.where(torch.arange(TOKENS)[:, None] < 20, 12.0 * ITSELF, FLAT)
        findings = attemper.check(Biased(), bias(mixed, FLAT, 12.0 * ITSELF)).findings
        assert {each.code: each.heads for each in findings if each.code in ("ATT301", "ATT304")} == {
            "ATT301": (0,),
            "ATT304": (2,),
        }
        once = attemper.check(Biased(), [bias(mixed, FLAT, mixed), bias(mixed, FLAT, 12.0 * ITSELF)]).findings
        assert {each.code: each.heads for each in once if each.code in ("ATT301", "ATT304")} == {"ATT301": (0,), "ATT304": (2,)}

    def test_at_rest_on_the_first_token_is_not(self) -> None:
        assert found(bias(FLAT, 30.0 * FIRST, FLAT), "ATT304") == []

    def test_what_a_dead_row_is_can_be_set(self) -> None:
        assert found(bias(FLAT, 10.0 * ITSELF, FLAT), "ATT304", dead_gain=0.01)


class TestPrevious:
    def test_one_head_of_three(self) -> None:
        (finding,) = found(bias(FLAT, 4.0 * BEFORE + CAUSAL, FLAT), "ATT305")
        assert finding.heads == (1,)
        assert finding.measured == 1.0
        assert finding.message.startswith("head 1: looks at the token before; it is the strongest key of 100% of its rows")

    def test_of_several_heads_it_says_whose_figure_it_is(self) -> None:
        rows = torch.arange(TOKENS)[:, None]
        most = torch.where(rows < 27, 4.0 * BEFORE, 4.0 * ITSELF) + CAUSAL
        (finding,) = found(bias(FLAT, most, 4.0 * BEFORE + CAUSAL), "ATT305")
        assert finding.message.startswith(
            "heads 1 and 2: look at the token before; most in head 2: it is the strongest key of 100% of its rows"
        )

    def test_the_next_token_is_not_the_previous_one(self) -> None:
        assert found(bias(FLAT, 4.0 * BEFORE.T, FLAT), "ATT305") == []

    def test_nine_rows_of_ten(self) -> None:
        rows = torch.arange(TOKENS)[:, None]
        most = torch.where(rows < 26, 4.0 * BEFORE, 4.0 * ITSELF) + CAUSAL
        (finding,) = found(bias(FLAT, most, FLAT), "ATT305", previous_rows=0.8)
        assert finding.measured == pytest.approx(25 / 28)
        assert found(bias(FLAT, most, FLAT), "ATT305") == []

    def test_cross_attention_has_no_token_before(self) -> None:
        longer = F.pad(4.0 * BEFORE, (0, 2))
        q, k = torch.zeros(1, 1, TOKENS, WIDTH), torch.zeros(1, 1, TOKENS + 2, WIDTH)

        class Cross(nn.Module):
            def forward(self, bias: Tensor) -> Tensor:
                return F.scaled_dot_product_attention(q, k, k, bias)

        assert attemper.check(Cross(), longer[None, None], select="ATT305").findings == ()


class TestSeveralInputs:
    def test_a_finding_says_on_how_many_it_holds_and_how_far_apart_they_lie(self) -> None:
        given = [bias(FLAT, strength * FLAT, FLAT) for strength in (0.1, 1.0, 0.05)]
        (finding,) = found(given, "ATT303")
        assert finding.heads == (1,)
        alone = [float(attemper.check(Biased(), one).rows[0].stats.mean_normalized_entropy[1]) for one in given]
        assert finding.measured == pytest.approx(max(alone))
        words = re.search(r"head 1 so on 2 of 3 inputs, from ([\d.]+) to ([\d.]+)", finding.message)
        assert words is not None
        assert [float(each) for each in words.groups()] == [float(f"{figure:.3g}") for figure in (min(alone), max(alone))]

    def test_the_table_is_over_all_of_them(self) -> None:
        given = [bias(FLAT, strength * FLAT, FLAT) for strength in (1.0, 3.0)]
        both, first, second = attemper.check(Biased(), given), *(attemper.check(Biased(), one) for one in given)
        assert torch.equal(both.rows[0].stats.rows, first.rows[0].stats.rows + second.rows[0].stats.rows)
        assert both.totals.max_logit == max(first.totals.max_logit, second.totals.max_logit)
        assert both.inputs == "given: bias [1, 3, 29, 29]; given: bias [1, 3, 29, 29]"

    def test_a_large_logit_on_the_second_is_found(self) -> None:
        given = [bias(FLAT, FLAT, FLAT), bias(FLAT, 200.0 * ITSELF, FLAT)]
        (finding,) = found(given, "ATT202")
        assert finding.measured == pytest.approx(200.0)

    def test_a_list_of_tensors_is_one_input_by_position(self) -> None:
        report = attemper.check(Biased(), [bias(FLAT)["bias"]])
        assert report.inputs == "1 positional argument"

    def test_passages(self, llama_folder: Path) -> None:
        report = attemper.check(str(llama_folder), passages=3)
        assert re.match(
            r"the built-in passage, passages 1–3 of 3, its own tokenizer, \d+ tokens, cut from \d+–\d+, ", report.inputs
        )
        assert report.inputs.count("passage, ") == 1
        assert report.rows[0].stats.rows[0] > attemper.check(str(llama_folder)).rows[0].stats.rows[0]

    def test_passages_of_random_ids_differ(self) -> None:
        model, _ = build("llama", gain=6.0)
        one, three = attemper.check(model), attemper.check(model, passages=3)
        assert torch.equal(three.rows[0].stats.rows, 3 * one.rows[0].stats.rows)
        assert three.totals.mean_gain != one.totals.mean_gain
        assert three.inputs == "random token ids, passages 1–3 of 3, 32 tokens"

    def test_what_is_no_text_cannot_be_cut(self) -> None:
        with pytest.raises(LoadError, match="--passages 2 cuts text, and these are given: bias"):
            attemper.check(Biased(), bias(FLAT), passages=2)
        with pytest.raises(ArgumentError, match="passages: got 0; expected a whole number, 1 or more"):
            attemper.check(Biased(), bias(FLAT), passages=0)

    def test_more_passages_than_words(self, llama_folder: Path, tmp_path: Path) -> None:
        (tmp_path / "few.txt").write_text("three words here")
        with pytest.raises(LoadError, match=r"few.txt has 3 words; --passages 4 needs as many or more"):
            attemper.check(str(llama_folder), str(tmp_path / "few.txt"), passages=4)
