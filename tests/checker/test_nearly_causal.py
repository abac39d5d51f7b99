"""Masks that are causal but for a few pairs are told, and masks that are so by design are not."""

import pytest
import torch
from torch import Tensor

import attemper
from attemper.report import Report, Severity
from tests.checker.plain_models import (
    Language,
    Mask,
    bidirectional,
    but_for,
    causal,
    chunks,
    ids,
    language,
    padded_on_the_left,
    past,
    prefix,
)


def checked(*masks: Mask, mask: Tensor | None = None, kind: type[Language] = Language) -> Report:
    given = {"input_ids": ids()} | ({} if mask is None else {"attention_mask": mask})
    return attemper.check(language(*masks, kind=kind), given, select="ATT402")


@pytest.mark.parametrize(
    ("masks", "words"),
    [
        ((past(1), past(1)), "22 pairs (query 0 sees key 1) in layers.0, layers.1"),
        ((past(1), causal), "22 pairs (query 0 sees key 1) in layers.0"),
        ((past(1, left=8), past(1, left=8)), "22 pairs (query 0 sees key 1) in layers.0, layers.1"),
        ((causal, but_for((20, 22))), "1 pair (query 20 sees key 22) in layers.1"),
        ((but_for((3, 4)),), "1 pair (query 3 sees key 4) in layers.0"),
        ((but_for((2, 19), (5, 9)),), "2 pairs (query 2 sees key 19) in layers.0"),
    ],
)
def test_a_few_pairs(masks: tuple[Mask, ...], words: str) -> None:
    (finding,) = checked(*masks).findings
    assert finding.severity is Severity.WARNING
    assert f"the mask is causal but for {words}" in finding.message
    assert "moves" in finding.message


@pytest.mark.parametrize(
    "mask",
    [
        bidirectional,
        past(1, left=1),
        past(4, left=4),
        past(5, left=16),
        past(2),
        chunks(2),
        chunks(4),
        chunks(7, before=False),
        prefix(2),
        prefix(9),
        prefix(6, start=5),
    ],
    ids=[
        "bidirectional",
        "window of one each way",
        "window",
        "window with a look ahead",
        "look ahead by two",
        "chunks of two",
        "chunks of four",
        "chunks alone",
        "prefix of two",
        "prefix",
        "image",
    ],
)
def test_a_design_is_silent(mask: Mask) -> None:
    assert checked(mask, mask).findings == ()
    assert checked(mask, mask, mask=padded_on_the_left()).findings == ()


@pytest.mark.parametrize("pair", [(3, 4), (20, 22)])
def test_one_pair_of_a_model_that_says_it_is_causal_is_an_error_wherever_it_lies(pair: tuple[int, int]) -> None:
    class TinyForCausalLM(Language):
        pass

    (finding,) = checked(causal, but_for(pair), kind=TinyForCausalLM).findings
    assert finding.severity is Severity.ERROR
    assert f"changing the tokens from position {pair[1]} on" in finding.message


@pytest.mark.parametrize("mask", [prefix(6), prefix(6, start=14), but_for(base=chunks(4))], ids=["prefix", "image", "chunks"])
def test_blocks_of_a_model_that_says_it_is_causal_are_let_be_where_half_of_the_tokens_move_nothing(mask: Mask) -> None:
    class TinyForCausalLM(Language):
        pass

    def to_the_middle(length: int) -> Tensor:
        made = mask(length)
        made[: length // 2, length // 2 :] = False
        return made

    assert checked(to_the_middle, kind=TinyForCausalLM).findings == ()


def test_without_a_way_to_try_it_the_mask_speaks() -> None:
    class Pooled(Language):
        def forward(self, input_ids: Tensor) -> Tensor:
            return super().forward(input_ids).mean(1)

    (finding,) = checked(past(1), kind=Pooled).findings
    assert "causal but for 22 pairs" in finding.message
    assert finding.message.endswith("whether outputs depend on it could not be tried on these inputs.")


def test_a_convolution_has_a_remedy_of_its_own() -> None:
    class Convolved(Language):
        def embedded(self, input_ids: Tensor) -> Tensor:
            x = super().embedded(input_ids)
            return x + torch.roll(x, -1, dims=1)

    (finding,) = checked(causal, kind=Convolved).findings
    assert finding.module == ""
    assert "layers named" not in finding.remedy
    assert "look for what else mixes positions" in finding.remedy
