"""A model that disagrees with itself is told as such, and not as one that sees the future or depends on its batch."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import attemper
from tests.checker.plain_models import Language, causal, ids, language, padded_on_the_left

PROBED = {"ATT402", "ATT403", "ATT405", "ATT406"}


class Noisy(Language):
    """Drops some of its embedding in evaluation mode, too."""

    share = 0.1

    def embedded(self, input_ids: Tensor) -> Tensor:
        return F.dropout(super().embedded(input_ids), self.share)


class Whispering(Language):
    """Draws noise a little below what the probes allow for: of more draws one would be above."""

    def after(self, x: Tensor, real: Tensor | None) -> Tensor:
        return super().after(x, real) + 9e-4 * torch.rand(x.shape[1], 1)


@pytest.mark.parametrize("kind", [Noisy, Whispering])
@pytest.mark.parametrize("padded", [True, False])
def test_it_is_told_and_nothing_is_blamed_on_masks(kind: type[Language], padded: bool) -> None:
    inputs = {"input_ids": ids(), "attention_mask": padded_on_the_left()}
    report = attemper.check(language(causal, causal, kind=kind, padded=padded), inputs)
    assert PROBED.isdisjoint(finding.code for finding in report.findings)
    assert any("it is not deterministic: run twice on the same inputs" in note for note in report.notes), report.notes


def test_a_shape_that_differs() -> None:
    class Growing(Language):
        runs = 0

        def forward(self, input_ids: Tensor) -> Tensor:
            self.runs += 1
            return super().forward(input_ids).repeat(1, 1, self.runs)

    report = attemper.check(language(causal, kind=Growing), {"input_ids": ids()})
    assert any("another shape the second time" in note for note in report.notes), report.notes


def test_one_that_runs_but_once() -> None:
    class Once(Language):
        ran = False

        def forward(self, input_ids: Tensor) -> Tensor:
            assert not self.ran, "never again"
            self.ran = True
            return super().forward(input_ids)

    report = attemper.check(language(causal, kind=Once), {"input_ids": ids()})
    assert any("it fails the second time" in note and "never again" in note for note in report.notes), report.notes


def test_a_model_that_agrees_with_itself_is_probed() -> None:
    report = attemper.check(language(causal), {"input_ids": ids()})
    assert not any("deterministic" in note for note in report.notes), report.notes
