"""Quantised checkpoints: attention is seen, outputs stay the same, and q and k are followed to projections of any class."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper.capture import AttentionCall, capture
from tests.capture.architectures import build
from tests.capture.watching import same

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own, torchao's


class Linear8bitLt(nn.Module):
    """An int8 weight with a scale for each row, in a class that is no nn.Linear: as bitsandbytes names its own."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("scale", linear.weight.detach().abs().amax(1, keepdim=True) / 127)
        self.register_buffer("weight", (linear.weight.detach() / self.scale).round().to(torch.int8))
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.scale, self.bias)  # type: ignore[operator]


class PackedWeights(Linear8bitLt):
    """The same under a name that says nothing; it tells what it reads and gives."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self.in_features, self.out_features = linear.in_features, linear.out_features


class Opaque(Linear8bitLt):
    """The same without that."""


def quantised(kind: type[Linear8bitLt], name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    model, inputs = build(name, gain=3.0)
    for module in list(model.modules()):
        for child, linear in list(module.named_children()):
            if type(linear) is nn.Linear:
                setattr(module, child, kind(linear))
    return model, inputs


def seen(model: nn.Module, inputs: dict[str, Tensor]) -> list[AttentionCall]:
    calls: list[AttentionCall] = []
    with torch.no_grad():
        plain = model(**inputs)
        with capture(model, calls.append, follow_projections=True) as captured:
            output = model(**inputs)
    assert same(plain, output)
    assert captured.unseen() == ()
    return calls


@pytest.mark.parametrize("name", ["llama", "bloom", "xglm"])
@pytest.mark.parametrize("kind", [Linear8bitLt, PackedWeights])
def test_eight_bit_modules(kind: type[Linear8bitLt], name: str) -> None:
    calls = seen(*quantised(kind, name))
    assert len(calls) == 2
    assert {call.query_change for call in calls} == {"scaled" if name == "xglm" else "unchanged"}
    assert {call.key_change for call in calls} == {"unchanged"}


def test_a_class_that_says_nothing_is_not_followed() -> None:
    calls = seen(*quantised(Opaque, "llama"))
    assert {call.query_change for call in calls} == {"unknown"}
    assert {call.query_factor for call in calls} == {None}


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_torchao_weight_only(name: str) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model, inputs = build(name, gain=3.0)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    assert any(type(weight.data) is not Tensor for weight in model.parameters())
    calls = seen(model, inputs)
    assert len(calls) == 2
    assert {call.query_change for call in calls} == {"unchanged"}
