"""FlexAttention, compiled or not: masks and biases are written out; what more a score_mod does is named."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attemper.capture import AttentionCall, capture
from tests.capture.watching import agrees, same

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own: flex_attention wants to be compiled

BATCH, HEADS, TOKENS, WIDTH = 2, 3, 16, 8
compiled = torch.compile(flex_attention, backend="eager")
SLOPES = torch.tensor([0.5, 0.25, 0.125])


class Flex(nn.Module):
    """Calls a form of flex_attention with q, k, v and whatever else it was given."""

    def __init__(self, use: str, **options: Any) -> None:
        super().__init__()
        self.use, self.options = use, options

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        function = compiled if self.use == "compiled" else flex_attention
        return function(q, k, v, **self.options)  # type: ignore[return-value]


def alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score + SLOPES[h] * (j - i)


def hiding(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.where(j <= i + b, score, -torch.inf)


def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.tanh(score / 2) * 2


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return j <= i


def qkv(kv_heads: int = HEADS) -> list[Tensor]:
    torch.manual_seed(3)
    return [torch.randn(BATCH, heads, TOKENS, WIDTH) for heads in (HEADS, kv_heads, kv_heads)]


def block_mask() -> Any:
    return create_block_mask(causal, None, None, TOKENS, TOKENS, device="cpu", BLOCK_SIZE=8)


@pytest.mark.parametrize(
    ("use", "options"),
    [
        ("plain", lambda: {"score_mod": alibi, "block_mask": block_mask()}),
        ("plain", lambda: {"score_mod": hiding}),
        ("compiled", dict),
        ("compiled", lambda: {"scale": 0.3, "block_mask": block_mask()}),
        ("compiled", lambda: {"score_mod": alibi, "block_mask": block_mask()}),
    ],
    ids=["bias and mask", "hiding", "compiled", "compiled with mask", "compiled with bias and mask"],
)
def test_masks_and_biases_are_written_out(use: str, options: Callable[[], dict[str, Any]]) -> None:
    torch.compiler.reset()
    given = options()
    model, inputs = nn.Sequential(Flex(use, **given)), qkv()
    calls: list[AttentionCall] = []
    with torch.no_grad():
        plain = model[0](*inputs)
        with capture(model, calls.append) as seen:
            output = model[0](*inputs)
    assert same(plain, output)
    assert seen.unseen() == ()
    (call,) = calls
    assert (call.module, call.seam, call.scale_given) == ("0", "flex", call.scale if use == "plain" else given.get("scale"))
    assert call.scale == pytest.approx(given.get("scale", WIDTH**-0.5))
    agrees(call, output)
    assert compiled is sys.modules[__name__].__dict__["compiled"]


def opaque(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """A backend inside of which, as of inductor's kernels, no torch function mode sees anything."""

    def run(*args: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return graph(*args)

    return run


class Held(nn.Module):
    """Holds the compiled function on its class, as torchtitan does, and finds it under no other name."""

    attend = staticmethod(torch.compile(flex_attention, backend=opaque))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return Held.attend(q, k, v, block_mask=block_mask())  # type: ignore[return-value]


def test_a_compiled_function_that_a_class_holds_is_found() -> None:
    torch.compiler.reset()
    calls: list[AttentionCall] = []
    model, held = nn.Sequential(Held()), vars(Held)["attend"]
    with torch.no_grad(), capture(model, calls.append) as seen:
        output = model[0](*qkv())
    assert seen.unseen() == ()
    (call,) = calls
    assert (call.module, call.seam) == ("0", "flex")
    agrees(call, output)
    assert vars(Held)["attend"] is held


def test_a_score_mod_that_does_more_than_add_is_named() -> None:
    torch.compiler.reset()
    calls: list[AttentionCall] = []
    model = nn.Sequential(Flex("plain", score_mod=capped))
    with torch.no_grad(), capture(model, calls.append) as seen:
        model[0](*qkv())
    assert [bool(call.mismatch) for call in calls] == [True]
    ((name, reason),) = [(each.module, each.reason) for each in seen.unseen()]
    assert name == "0"
    assert "score_mod does more" in reason


def test_grouped_heads() -> None:
    torch.compiler.reset()
    calls: list[AttentionCall] = []
    model = Flex("plain", enable_gqa=True, score_mod=alibi)
    with torch.no_grad(), capture(model, calls.append):
        output = model(*qkv(kv_heads=1))
    (call,) = calls
    assert call.key.shape[1] == 1
    agrees(call, output)
