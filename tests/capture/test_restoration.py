"""What capture must leave behind: nothing, whatever happens."""

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from attemper.capture import AttentionCall, capture
from attemper.errors import ArgumentError, UnsupportedError
from tests.capture.architectures import build

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


def state() -> tuple[Any, ...]:
    """Everything that capture touches."""
    from transformers.modeling_utils import AttentionInterface

    return (
        AttentionInterface.__dict__["get_interface"],
        nn.MultiheadAttention.__dict__["forward"],
        nn.TransformerEncoderLayer.__dict__["forward"],
        nn.TransformerEncoder.__dict__["forward"],
        F.multi_head_attention_forward,
        F.scaled_dot_product_attention,
        list(module_hooks._global_forward_hooks),
        list(module_hooks._global_forward_pre_hooks),
        _get_current_function_mode_stack(),
        torch.backends.mha.get_fastpath_enabled(),
    )


class Attend(nn.Module):
    """Attention with a linear map before it, and a failure on request."""

    def __init__(self, width: int = 6, fail: bool = False) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.fail = fail

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        output = F.scaled_dot_product_attention(q, k, v, dropout_p=0.25 if self.training else 0.0)
        if self.fail:
            raise KeyError("from the model")
        return output.transpose(1, 2).flatten(2)


def model_of(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    if kind == "huggingface":
        return build("llama")
    if kind == "multihead":
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2).eval(), {"src": torch.randn(2, 3, 8)}
    return nn.Sequential(Attend(), Attend()), {"input": torch.randn(2, 3, 6)}


@pytest.mark.parametrize("kind", ["huggingface", "sdpa", "multihead"])
def test_an_observers_exception_goes_through_and_everything_is_restored(kind: str) -> None:
    model, inputs = model_of(kind)
    before = state()
    error = LookupError("from the observer")

    def observer(call: AttentionCall) -> None:
        raise error

    with torch.no_grad(), pytest.raises(LookupError, match="from the observer") as caught, capture(model, observer):
        model(**inputs)
    assert caught.value is error
    assert state() == before
    calls: list[AttentionCall] = []
    with torch.no_grad(), capture(model, calls.append):
        model(**inputs)
    assert len(calls) == 2


def test_after_a_models_exception_names_are_right_again() -> None:
    model = nn.Sequential(Attend(), Attend(fail=True))
    calls: list[AttentionCall] = []
    before = state()
    with capture(model, calls.append) as seen:
        for _ in range(2):
            with pytest.raises(KeyError, match="from the model"):
                model(torch.randn(2, 3, 6))
        F.scaled_dot_product_attention(*[torch.randn(1, 2, 3, 4)] * 3)
    assert state() == before
    assert [(call.module, call.call) for call in calls] == [("0", 0), ("1", 0), ("0", 1), ("1", 1), ("", 0)]
    assert seen.calls == 5


def test_names_survive_what_torch_does_not_tell_hooks_of() -> None:
    class Interrupted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt  # no Exception: forward hooks are not called

    class Patient(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Interrupted()

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.inner(x)
            except KeyboardInterrupt:
                return x

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Patient(), Attend()

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)[:, None]
            return self.second(F.scaled_dot_product_attention(x, x, x)[:, 0])

    calls: list[AttentionCall] = []
    model = Outer()
    with capture(model, calls.append):
        model(torch.randn(2, 3, 6))
    assert [call.module for call in calls] == ["", "second"]


@pytest.mark.parametrize("kind", ["huggingface", "sdpa", "multihead"])
def test_nothing_is_kept_alive(kind: str) -> None:
    model, inputs = model_of(kind)
    queries: list[weakref.ref[Tensor]] = []

    class Observer:
        def __call__(self, call: AttentionCall) -> None:
            queries.append(weakref.ref(call.query))
            call.row_stats()

    observer = Observer()
    with torch.no_grad(), capture(model, observer, follow_projections=True) as seen:
        model(**inputs)
    gone = weakref.ref(observer), weakref.ref(model)
    assert seen.calls == 2
    gc.collect()
    gc.disable()
    try:
        del observer, model
        assert gone[0]() is None
        assert not any(each() is not None for each in queries)
    finally:
        gc.enable()
    gc.collect()
    assert gone[1]() is None
    assert seen.unseen() == ()


def test_one_capture_at_a_time() -> None:
    model, inputs = model_of("sdpa")
    with capture(model, lambda call: None) as outer:
        with pytest.raises(UnsupportedError, match="another capture is running"), capture(model, lambda call: None):
            pass
        model(**inputs)
    assert outer.calls == 2
    with pytest.raises(UnsupportedError, match="used before"), outer:
        pass
    with capture(model, lambda call: None) as again:
        model(**inputs)
    assert again.calls == 2


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"model: got str; expected a torch\.nn\.Module"):
        capture("llama", lambda call: None)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="observer: got list; expected a function of one AttentionCall"):
        capture(nn.Identity(), [])  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["huggingface", "sdpa", "multihead"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_is_not_counted(kind: str, reentrant: bool) -> None:
    def run(observed: bool) -> tuple[list[Any], int]:
        torch.manual_seed(3)
        if kind == "huggingface":
            model, inputs = build("llama", dropout=0.25)
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.train()

            def loss() -> Tensor:
                return model(**inputs, use_cache=False).logits.square().mean()
        else:
            model = nn.Sequential(Attend(), Attend()) if kind == "sdpa" else nn.TransformerEncoderLayer(8, 2, batch_first=True)
            x = torch.randn(2, 3, 6 if kind == "sdpa" else 8, requires_grad=True)

            def loss() -> Tensor:
                return checkpoint(model, x, use_reentrant=reentrant).square().sum()

        calls: list[AttentionCall] = []
        torch.manual_seed(4)
        if observed:
            with capture(model, calls.append, follow_projections=True):
                loss().backward()
        else:
            loss().backward()
        return [weight.grad for weight in model.parameters() if weight.grad is not None], len(calls)

    plain, _ = run(observed=False)
    gradients, calls = run(observed=True)
    assert calls == (1 if kind == "multihead" else 2)
    assert plain
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients, strict=True))


def test_another_thread_is_not_told_of() -> None:
    model, inputs = model_of("sdpa")
    other, other_inputs = model_of("multihead")
    with torch.no_grad(), capture(model, lambda call: None) as seen:
        thread = threading.Thread(target=lambda: (model(**inputs), other(**other_inputs)))
        thread.start()
        thread.join()
        assert seen.calls == 0
        model(**inputs)
    assert seen.calls == 2


def test_a_mode_of_the_callers_stays_where_it_is() -> None:
    from torch.overrides import BaseTorchFunctionMode

    model, inputs = model_of("multihead")
    with torch.no_grad(), BaseTorchFunctionMode() as mode:
        plain = model(**inputs)
        with capture(model, lambda call: None) as seen:
            output = model(**inputs)
        assert _get_current_function_mode_stack() == [mode]
    assert torch.equal(plain, output)
    assert seen.calls == 2
