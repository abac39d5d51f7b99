"""Every architecture of the sweep: capture changes nothing, counts right, and its records say what was computed."""

import pytest
import torch
from torch import Tensor, nn

from attemper.capture import AttentionCall, capture
from tests.capture.architectures import ARCHITECTURES, WRITTEN_OUT, build
from tests.capture.watching import agrees, logged_results, same, trained

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own, about kernels that are not installed

EVERY = [(name, attn) for name in ARCHITECTURES for attn in ARCHITECTURES[name].attn]


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize(("name", "attn"), EVERY)
def test_outputs_are_identical_and_calls_are_counted(name: str, attn: str, padding: str) -> None:
    model, inputs = build(name, attn=attn, padding=padding, gain=6.0)
    before = (model.config.to_dict(), model.config._attn_implementation)
    calls: list[AttentionCall] = []
    with torch.no_grad():
        plain = model(**inputs)
        with capture(model, calls.append, follow_projections=True) as seen:
            captured = model(**inputs)
        after = model(**inputs)
    assert same(plain, captured)
    assert same(plain, after)
    assert seen.calls == len(calls) == ARCHITECTURES[name].calls
    assert [call.order for call in calls] == list(range(len(calls)))
    assert len({(call.module, call.call) for call in calls}) == len(calls)
    assert (model.config.to_dict(), model.config._attn_implementation) == before


@pytest.mark.parametrize(("name", "attn"), EVERY)
def test_training_is_identical_with_dropout_and_gradients(name: str, attn: str) -> None:
    def made() -> tuple[nn.Module, dict[str, Tensor]]:
        return build(name, attn=attn, gain=3.0, dropout=0.25)

    assert same(trained(made, observed=False), trained(made, observed=True))


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize(("name", "attn"), [(name, attn) for name, attn in EVERY if name not in WRITTEN_OUT])
def test_a_record_reproduces_what_the_attention_function_gave(name: str, attn: str, padding: str) -> None:
    model, inputs = build(name, attn=attn, padding=padding, gain=6.0)
    calls: list[AttentionCall] = []
    with torch.no_grad(), capture(model, calls.append), logged_results() as results:
        model(**inputs)
    calls = [call for call in calls if call.seam != "multihead"]
    assert len(calls) == len(results) > 0
    for call, result in zip(calls, results, strict=True):
        agrees(call, result)
        assert call.output is not None
        assert torch.equal(call.output, result)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_nothing_is_reported_as_unseen(name: str) -> None:
    model, inputs = build(name)
    with torch.no_grad(), capture(model, lambda call: None) as seen:
        model(**inputs)
    assert seen.unseen() == ()
