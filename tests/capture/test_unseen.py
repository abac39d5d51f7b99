"""What capture did not see is said, with the reason; what it saw is not."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper.capture import Unseen, capture

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own, TorchScript's deprecation


class EagerAttention(nn.Module):
    """Attention by sums instead of products, behind any form of softmax."""

    def __init__(self, softmax: str = "function") -> None:
        super().__init__()
        self.softmax = nn.Softmax(dim=-1) if softmax == "module" else None
        self.kind = softmax

    def forward(self, q: Tensor) -> Tensor:
        z = (q.unsqueeze(-2) + q.unsqueeze(-3)).tanh().sum(-1)
        if self.softmax is not None:
            return self.softmax(z) @ q
        return {"function": F.softmax, "torch": torch.softmax, "method": Tensor.softmax}[self.kind](z, dim=-1) @ q


class FusedAttention(nn.Module):
    """Attention that is seen."""

    def forward(self, q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q)


class Mixer(nn.Module):
    """Attends without saying so in its name."""

    def forward(self, q: Tensor) -> Tensor:
        return (q.unsqueeze(-2) - q.unsqueeze(-3)).abs().sum(-1).softmax(-1) @ q


class AttentionNorm(nn.LayerNorm):
    """Carries the word and does not attend."""


class LinearAttention(nn.Module):
    """Has the name and no softmax."""

    def forward(self, q: Tensor) -> Tensor:
        return q @ (q.transpose(-1, -2) @ q)


def unseen(model: nn.Module, *args: Tensor) -> list[tuple[str, str]]:
    with torch.no_grad(), capture(model, lambda call: None) as seen:
        model(*args)
        inside = seen.unseen()
    assert seen.unseen() == inside
    return [(each.module, each.reason) for each in inside]


@pytest.mark.parametrize("softmax", ["function", "torch", "method", "module"])
def test_eager_attention_is_named_by_its_softmax(softmax: str) -> None:
    ((name, reason),) = unseen(nn.Sequential(EagerAttention(softmax), FusedAttention()), torch.randn(1, 2, 3, 4))
    assert name == "0"
    assert "a softmax over logits ran" in reason


def test_heads_that_are_folded_into_the_batch() -> None:
    ((name, _),) = unseen(nn.Sequential(nn.Identity(), Mixer()), torch.randn(6, 3, 4))
    assert name == "1"
    assert unseen(nn.Sequential(nn.Linear(4, 5), nn.Softmax(-1)), torch.randn(6, 3, 4)) == []  # a router


def test_a_module_that_does_not_say_attention() -> None:
    ((name, reason),) = unseen(nn.Sequential(nn.Identity(), Mixer()), torch.randn(1, 2, 3, 4))
    assert name == "1"
    assert "a softmax over logits ran" in reason


def test_names_alone() -> None:
    ((name, reason),) = unseen(nn.Sequential(AttentionNorm(4), LinearAttention()), torch.randn(1, 2, 3, 4))
    assert name == "1"
    assert "neither a call that capture sees nor a softmax" in reason


def test_softmax_that_is_no_attention() -> None:
    class Router(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.softmax(1) + x[0].softmax(-1)  # over another dimension; of fewer dimensions

    assert unseen(nn.Sequential(Router()), torch.randn(1, 2, 3, 4)) == []


def test_modules_that_never_ran() -> None:
    model = nn.ModuleDict(
        {"used": FusedAttention(), "spare": EagerAttention(), "nested": nn.ModuleDict({"attn": nn.MultiheadAttention(4, 2)})}
    )
    with capture(model, lambda call: None) as seen:
        model["used"](torch.randn(1, 2, 3, 4))
    assert seen.unseen() == (Unseen("spare", "it never ran"), Unseen("nested.attn", "it never ran"))


def test_the_outermost_of_several_that_never_ran() -> None:
    class OuterAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = EagerAttention()

    model = nn.ModuleList([OuterAttention()])
    with capture(model, lambda call: None) as seen:
        pass
    assert seen.unseen() == (Unseen("0", "it never ran"),)


def test_scripted_modules_hide_their_calls() -> None:
    model = nn.Sequential(torch.jit.trace(FusedAttention(), torch.randn(1, 2, 3, 4)), torch.jit.script(nn.Linear(4, 4)))
    ((name, reason),) = unseen(model, torch.randn(1, 2, 3, 4))
    assert name == "0"
    assert "TorchScript" in reason


class TalkingHeads(nn.Module):
    """Mixes its logits over heads."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.eye(2))

    def forward(self, q: Tensor) -> Tensor:
        return torch.einsum("bhqk,hg->bgqk", q @ q.mT, self.mix).softmax(-1) @ q


class CutWeights(nn.Module):
    """Cuts its weights before they meet the values."""

    def forward(self, q: Tensor) -> Tensor:
        return (q @ q.mT).softmax(-1).cumsum(-1) @ q


class Looking(nn.Module):
    """Looks at its weights and gives them back."""

    def forward(self, q: Tensor) -> Tensor:
        return (q @ q.mT).softmax(-1)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (TalkingHeads(), "its logits pass through einsum"),
        (CutWeights(), "no product of its weights with values; cumsum was applied to them"),
        (Looking(), "no product of its weights with values"),
    ],
    ids=["logits", "weights", "no values"],
)
def test_what_is_not_followed_is_named(model: nn.Module, words: str) -> None:
    ((name, reason),) = unseen(nn.Sequential(nn.Identity(), model), torch.randn(1, 2, 3, 4))
    assert name == "1"
    assert words in reason
