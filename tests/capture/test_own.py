"""attemper's own attention inside a model is seen, with everything that was passed."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attemper
from attemper.ops import LISTENERS
from tests.capture.test_functional import Block, qkv, seen
from tests.capture.watching import agrees

HEADS, QUERIES, KEYS = 6, 5, 7


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"scale": 0.75, "is_causal": True, "offset": 2},
        {"scale": torch.linspace(0.1, 0.6, HEADS), "softcap": 2.0, "window": (3, 1)},
        {"scale": torch.linspace(0.1, 0.6, QUERIES).expand(HEADS, QUERIES), "sinks": torch.linspace(-1.0, 1.0, HEADS)},
        {"attn_mask": torch.arange(QUERIES * KEYS).reshape(QUERIES, KEYS) % 3 > 0, "return_stats": True},
        {"impl": "blocked"},
        {"impl": "reference"},
    ],
    ids=["plain", "causal", "scale per head", "scale per query, sinks", "mask, statistics", "blocked", "reference"],
)
def test_a_call_is_seen_once_and_as_it_was_given(given: dict[str, Any]) -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = attemper.attention(query, key, value, **given)
        return output[0] if isinstance(output, tuple) else output

    output, (call,) = seen(Block(attend), *qkv(2))
    assert (call.module, call.call, call.seam) == ("attn", 0, "attemper")
    expected = given.get("scale")
    assert torch.equal(call.scale_given, expected) if isinstance(call.scale_given, Tensor) else call.scale_given == expected
    agrees(call, output)
    assert not LISTENERS


def test_grouped_heads_are_recorded_before_they_are_repeated() -> None:
    output, (call,) = seen(Block(lambda *each: attemper.attention(*each, enable_gqa=True)), *qkv(2, kv_heads=2))
    assert call.key.shape[1] == 2
    agrees(call, output)


class Unscaled(nn.Module):
    """Self-attention by attemper, without a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (each(x).unflatten(-1, (2, 32)).transpose(1, 2) for each in (self.query, self.key, self.value))
        return attemper.attention(query, key, value, scale=1.0).transpose(1, 2).flatten(-2)


def test_check_finds_the_missing_scale() -> None:
    report = attemper.check(Unscaled(), {"x": torch.randn(2, 23, 64)})
    assert "ATT101" in [finding.code for finding in report.findings]
