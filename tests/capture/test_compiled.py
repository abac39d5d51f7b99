"""torch.compile around, inside and beside a captured model."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper.capture import AttentionCall, capture
from tests.capture.architectures import build
from tests.capture.watching import same

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Attend(nn.Module):
    """Attention around a function that may be compiled."""

    def __init__(self, function: Any = F.scaled_dot_product_attention) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, x, x)


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("way", ["around", "in place", "inside"])
def test_a_compiled_model_is_seen_and_runs_compiled_again(way: str, fullgraph: bool, warm: bool) -> None:
    model: Any = nn.Sequential(Attend(), Attend())
    options: dict[str, Any] = {"backend": "aot_eager", "fullgraph": fullgraph}
    if way == "around":
        model = torch.compile(model, **options)
    elif way == "in place":
        model.compile(**options)
    else:
        model[0] = torch.compile(model[0], **options)
    x = torch.randn(1, 2, 3, 4)
    plain = model(x) if warm else None
    calls: list[AttentionCall] = []
    with capture(model, calls.append) as seen:
        output = model(x)
    assert len(calls) == 2
    assert [call.module.removeprefix("_orig_mod.").removesuffix("._orig_mod") for call in calls] == ["0", "1"]
    assert seen.unseen() == ()
    assert torch.equal(output, model(x) if plain is None else plain)


def test_a_compiled_hugging_face_model() -> None:
    model, inputs = build("llama")
    compiled: Any = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        plain = compiled(**inputs)
        calls: list[AttentionCall] = []
        with capture(compiled, calls.append):
            output = compiled(**inputs)
        assert len(calls) == 2
        assert same(plain, output)
        assert same(plain, compiled(**inputs))


def test_a_compiled_function_inside_a_model_is_left_alone() -> None:
    model = nn.Sequential(Attend(torch.compile(F.scaled_dot_product_attention, backend="aot_eager", fullgraph=True)), Attend())
    x = torch.randn(1, 2, 3, 4)
    plain = model(x)
    calls: list[AttentionCall] = []
    with capture(model, calls.append):
        output = model(x)
    assert torch.equal(plain, output)
    assert [call.module for call in calls][-1] == "1"
