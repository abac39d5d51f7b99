"""Models that compute attention in plain products: capture changes nothing, and every record gives the model's own weights."""

import contextlib
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attemper.capture import AttentionCall, capture
from attemper.checker import check
from attemper.report import Severity
from tests.capture import architectures, written_out
from tests.capture.watching import same, trained

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

EVERY = {name: architectures.ARCHITECTURES[name] for name in architectures.WRITTEN_OUT} | written_out.ROWS
PADDED = [(name, side) for name, row in EVERY.items() for side in ("right", "left") if side == "right" or "coder" in row.kind]


def build(name: str, **options: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    return (written_out if name in written_out.ROWS else architectures).build(name, **options)


def weights_of(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """The softmax of a record's logits, in float64, and the largest finite logit of each row."""
    key = call.key.repeat_interleave(call.query.shape[1] // call.key.shape[1], 1).double()
    scale = call.scale
    if isinstance(scale, Tensor):
        scale = scale.reshape(-1, 1, 1) if scale.ndim == 1 else scale
    logits = call.query.double() @ key.mT * scale
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    if call.attn_mask is not None:
        assert call.attn_mask.dtype != torch.bool
        logits = logits + call.attn_mask.double()
    largest = torch.where(logits.abs() < 1e4, logits.abs(), 0.0).amax(-1, keepdim=True)
    return logits.softmax(-1), largest


@contextlib.contextmanager
def logged_softmaxes() -> Generator[list[Tensor]]:
    """What every softmax gives while this runs."""
    results: list[Tensor] = []

    class Log(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = func(*args, **(kwargs or {}))
            if getattr(func, "__name__", "") == "softmax":
                results.append(output.clone())
            return output

    with Log():
        yield results


@pytest.mark.parametrize(("name", "padding"), PADDED)
def test_the_weights_of_every_record_are_the_models_own(name: str, padding: str) -> None:
    model, inputs = build(name, padding=padding, gain=3.0)
    calls: list[AttentionCall] = []
    with torch.no_grad():
        with logged_softmaxes() as theirs:
            plain = model(**inputs)
        with capture(model, calls.append) as seen:
            captured = model(**inputs)
    assert same(plain, captured)
    assert seen.unseen() == ()
    assert len(calls) == EVERY[name].calls
    assert all(call.mismatch is not None and not call.mismatch for call in calls)
    for call in calls:
        ours, largest = weights_of(call)
        allowed = 32 * torch.finfo(torch.float32).eps * (1 + largest)
        shaped = [each.reshape(ours.shape) for each in theirs if each.numel() == ours.numel()]
        assert any(bool(((each - ours).abs() <= allowed).all()) for each in shaped), (call.module, len(shaped))


@pytest.mark.parametrize("name", written_out.ROWS)
def test_training_is_identical_with_dropout_and_gradients(name: str) -> None:
    def made() -> tuple[nn.Module, dict[str, Tensor]]:
        return build(name, gain=2.0, dropout=0.25)

    assert same(trained(made, observed=False), trained(made, observed=True))


@pytest.mark.parametrize("name", EVERY)
def test_the_check_finds_no_error_in_scales_and_masks(name: str) -> None:
    report = check(*build(name), select="ATT1,ATT401")
    assert [finding.message for finding in report.findings if finding.severity is Severity.ERROR] == []
    assert report.rows
    assert report.unseen == ()


@pytest.mark.parametrize("name", written_out.NOT_SEEN)
def test_what_is_not_seen_is_said(name: str) -> None:
    row, words = written_out.NOT_SEEN[name]
    model, inputs = architectures.build_row(row, attn="eager", padding="none", gain=1.0, dropout=0.0, seed=7)
    with torch.no_grad():
        torch.manual_seed(5)  # Reformer draws its hashes
        plain = model(**inputs)
        torch.manual_seed(5)
        with capture(model, lambda call: None) as seen:
            captured = model(**inputs)
    assert same(plain, captured)
    assert seen.calls == row.calls
    assert len(seen.unseen()) == 2
    assert all(words in each.reason for each in seen.unseen())


def test_a_model_that_leaves_the_interface_on_request() -> None:
    model, inputs = architectures.build("gpt2", attn="eager", reorder_and_upcast_attn=True)
    calls: list[AttentionCall] = []
    with torch.no_grad(), capture(model, calls.append) as seen:
        model(**inputs)
    assert seen.unseen() == ()
    assert [(call.seam, call.mismatch) for call in calls] == [("eager", False)] * 2
    assert [call.scale for call in calls] == [pytest.approx(6**-0.5)] * 2
