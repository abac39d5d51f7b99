"""Padding that leaks is found in models that nobody knows, however they read their tokens; what cannot be tried is told."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper
from attemper.checker.inputs import Inputs
from attemper.checker.padding import padding_mask
from attemper.report import Report
from tests.checker.plain_models import WORDS, Language, bidirectional, causal, ids, language, padded_on_the_left

UNTRIED = "whether padding leaks was not tried"


class OneHot(Language):
    """Reads its ids without an embedding."""

    def embedded(self, input_ids: Tensor) -> Tensor:
        return F.one_hot(input_ids, WORDS).float() @ self.words.weight


class Vectors(Language):
    """Takes vectors for tokens."""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Any:
        return self.after(x, None if attention_mask is None else attention_mask > 0)


def checked(model: nn.Module, inputs: Any = None, mask: Tensor | None = None) -> Report:
    mask = padded_on_the_left() if mask is None else mask
    return attemper.check(model, {"input_ids": ids(), "attention_mask": mask} if inputs is None else inputs, select="ATT403")


def codes(report: Report) -> list[str]:
    assert not any(UNTRIED in note for note in report.notes), report.notes
    return [finding.code for finding in report.findings]


@pytest.mark.parametrize("kind", [Language, OneHot])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_a_layer_without_the_mask(kind: type[Language], dtype: torch.dtype) -> None:
    mask = padded_on_the_left().to(dtype)
    report = checked(language(causal, causal, kind=kind, padded=False), mask=mask)
    assert codes(report) == ["ATT403"]
    assert report.findings[0].module == "layers.0"
    assert codes(checked(language(causal, causal, kind=kind), mask=mask)) == []


def test_a_mask_that_is_added() -> None:
    mask = (padded_on_the_left() - 1) * 1e9
    assert codes(checked(language(causal, kind=_Added, padded=False), mask=mask)) == ["ATT403"]
    assert codes(checked(language(causal, kind=_Added), mask=mask)) == []


class _Added(Language):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        return self.after(self.embedded(input_ids), None if attention_mask is None else attention_mask == 0)


def test_vectors_are_changed_themselves() -> None:
    torch.manual_seed(3)
    inputs = {"x": torch.randn(2, 23, 15), "attention_mask": padded_on_the_left()}
    assert codes(checked(language(causal, kind=Vectors, padded=False), inputs)) == ["ATT403"]
    assert codes(checked(language(causal, kind=Vectors), inputs)) == []


def test_by_position_as_well_as_by_name() -> None:
    assert codes(checked(language(causal, padded=False), (ids(), padded_on_the_left()))) == ["ATT403"]


def test_ids_are_left_alone_where_an_embedding_reads_them() -> None:
    """A model may make masks and positions of them, as RoBERTa does: other ids there change more than what is embedded."""
    seen = []

    class Watched(Language):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
            seen.append(input_ids.clone())
            return super().forward(input_ids, attention_mask)

    assert codes(checked(language(bidirectional, kind=Watched, padded=False))) == ["ATT403"]
    whole = [each for each in seen if each.shape == ids().shape]
    assert len(whole) == 3  # once for the figures, once more, and once with something else embedded
    assert all(torch.equal(each, ids()) for each in whole)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (padded_on_the_left().float() / 2, "an attention_mask of other numbers than 0 and 1 does not say which"),
        (padded_on_the_left()[:, None, None, :], "an attention_mask of shape [2, 1, 1, 23] does not say which"),
    ],
)
def test_a_mask_that_says_nothing_is_told(mask: Tensor, words: str) -> None:
    class Deaf(Language):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
            return self.after(self.embedded(input_ids), None)

    report = checked(language(causal, kind=Deaf), mask=mask)
    assert any(UNTRIED in note and words in note for note in report.notes), report.notes


def test_inputs_without_positions_are_told() -> None:
    class Packed(Language):
        def forward(self, packed: Tensor, attention_mask: Tensor | None = None) -> Any:
            return self.after(self.embedded(packed.unflatten(0, (2, -1))) * 1, None)

    report = checked(language(causal, kind=Packed), {"packed": ids().flatten(), "attention_mask": padded_on_the_left()})
    assert any(f"{UNTRIED}: none of the inputs has a number" in note for note in report.notes), report.notes


@pytest.mark.parametrize(
    ("mask", "real"),
    [
        ([[1, 0, 1]], [[True, False, True]]),
        ([[1.0, 0.0, 1.0]], [[True, False, True]]),
        ([[0.0, -1e9, 0.0]], [[True, False, True]]),
        ([[0.0, -torch.inf, -torch.inf]], [[True, False, False]]),
        ([[0.0, 0.0, 0.0]], [[True, True, True]]),
        ([[0.5, 0.0, 1.0]], None),
        ([[[1, 0, 1]]], None),
    ],
)
def test_what_a_mask_says(mask: Any, real: Any) -> None:
    found = padding_mask(Inputs((), {"attention_mask": torch.tensor(mask)}, ""))
    assert (None if found is None else found.tolist()) == real
