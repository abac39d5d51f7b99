"""Models whose attention agrees are not called alike where their outputs are not."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from attemper.checker import Comparison, compare
from tests.capture.architectures import build
from tests.checker.comparing_cases import WithoutQueries
from tests.checker.plain_models import Language, causal, ids, language


def changed(part: str, factor: float) -> tuple[Comparison, Any]:
    model, inputs = build("llama", padding="right", gain=3.0)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_parameter(part).mul_(factor)
    return compare(model, other, inputs), model


def test_what_follows_the_last_call() -> None:
    model, _ = build("llama")
    last = len(model.model.layers) - 1
    part = f"model.layers.{last}.mlp.down_proj.weight"
    found, _ = changed(part, 5.0)
    assert not any(row.parts for row in found.rows)
    assert found.exit_code() == 1
    assert not found.equal
    assert found.parting is not None
    assert (found.parting.row, found.parting.cause, found.parting.parameters) == (len(found.rows), "outputs", (part,))
    text = " ".join(str(found).split())
    assert "They part after the last pair of calls: outputs." in text
    assert f"begins behind the last attention call, in model.layers.{last}.self_attn" in text
    assert f"parameters differ in {part}" in text


def test_the_head_alone() -> None:
    found, _ = changed("lm_head.weight", -1.0)
    assert found.exit_code() == 1
    assert [gap.parts for gap in found.outputs] == [False, True]
    assert "The difference begins in what makes the outputs of the last hidden states" in " ".join(str(found).split())


def test_rounding_is_no_difference() -> None:
    found, _ = changed("lm_head.weight", 1.0)
    assert found.equal
    assert "no difference at all, nor in the outputs." in str(found)
    found, _ = changed("lm_head.weight", 1.0 + 2**-23)
    assert (found.exit_code(), found.equal) == (0, False)
    assert found.to_dict()["outputs"][1]["place"] == "outputs"


def test_code_that_differs_with_equal_parameters() -> None:
    class Negated(Language):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return -super().forward(*args, **kwargs)

    found = compare(language(causal), language(causal, kind=Negated), {"input_ids": ids()})
    assert found.parting is not None
    assert "their parameters are equal, so that the code differs" in found.parting.explanation


def test_outputs_of_other_shapes_are_not_called_alike() -> None:
    class Pooled(Language):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs).mean(1)

    found = compare(language(causal), language(causal, kind=Pooled), {"input_ids": ids()})
    assert (found.exit_code(), found.outputs) == (0, ())
    assert "the outputs were not compared, as there are none of one shape" in " ".join(str(found).split())


@pytest.mark.parametrize("kind", [nn.Identity, WithoutQueries])
def test_a_factor_that_is_none_is_said_in_words(kind: type[nn.Module]) -> None:
    x = torch.randn(2, 3, 11, 5) if kind is WithoutQueries else torch.zeros(2, 3, 11, 5)

    class Zero(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x)

    model = Zero() if kind is nn.Identity else kind()
    text = str(compare(model, copy.deepcopy(model), (x,)))
    assert "nan" not in text
    assert ("no pairs" if kind is WithoutQueries else "all are 0") in text
