"""What goes wrong in a model or around it: nothing of a watch stays open, stops the run, or counts what it should not."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

import attemper
from attemper.errors import ArgumentError, UnsupportedError
from attemper.monitor import Watch
from tests.monitor.test_watching import BATCH, HEADS, TOKENS, drawn, llama, logged, train


def test_an_exception_in_the_model_leaves_nothing_open() -> None:
    model = llama().train()
    with attemper.watch(model) as watching:
        with pytest.raises(IndexError, match="out of range"):
            model(input_ids=torch.full((1, 3), 97))
        train(model, drawn(0))
        assert logged(watching.step()).layers[0].stats.rows.tolist() == [BATCH * TOKENS] * HEADS
    with attemper.watch(model):  # it can be watched again
        pass


def test_a_model_inside_another_watched_one_is_named() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.TransformerEncoderLayer(12, 3, 7, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    model = Outer().train()
    with attemper.watch(model) as outside, attemper.watch(model.inner) as inside:
        model(torch.randn(2, 5, 12)).sum().backward()
        assert [layer.layer for layer in logged(outside.step()).layers] == ["inner.self_attn"]
        with pytest.warns(UserWarning, match="watch the outermost alone"):
            inside.step()


def test_it_does_not_keep_a_model_alive() -> None:
    model = llama().train()
    watching = attemper.watch(model)
    train(model, drawn(0))
    watching.remove()
    reference = weakref.ref(model)
    del model, watching
    gc.collect()
    assert reference() is None


def stance() -> str:
    return torch._dynamo.eval_frame._stance.stance


def test_graphs_run_again_whatever_the_order_in_which_watches_end() -> None:
    first, second, third = (llama().train() for _ in range(3))
    a, b, c = (attemper.watch(model) for model in (first, second, third))
    assert stance() == "force_eager"
    a.remove()
    train(second, drawn(0))
    b.step()
    assert stance() == "force_eager"
    b.remove()
    del c, third
    gc.collect()
    assert stance() == "default"


def test_a_keyboard_interrupt_leaves_nothing_open() -> None:
    class Interrupted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.interrupts = nn.MultiheadAttention(12, 3, batch_first=True), True

        def forward(self, x: Tensor) -> Tensor:
            x = self.attention(x, x, x, need_weights=False)[0]
            if self.interrupts:
                raise KeyboardInterrupt("in the middle")
            return x

    model, x = Interrupted().train(), torch.randn(2, 5, 12)
    with attemper.watch(model) as watching:
        with pytest.raises(KeyboardInterrupt, match="in the middle"):
            model(x)
        model.interrupts = False
        model.eval()
        with torch.no_grad():
            model(x)  # closes what was left open, and counts for nothing
        assert torch.overrides._get_current_function_mode() is None
        model.interrupts = True
        with pytest.raises(KeyboardInterrupt, match="in the middle"):
            model(x)
    assert torch.overrides._get_current_function_mode() is None
    model.interrupts = False
    with attemper.watch(model.train()) as watching:
        model(x).sum().backward()
        assert logged(watching.step()).layers[0].stats.rows.tolist() == [10] * 3


def test_copies_of_a_watched_model_are_not_watched() -> None:
    model = llama(attn_implementation="sdpa").train()
    with attemper.watch(model, trackers=[print]) as watching:
        train(model, drawn(0))
        watching.step()
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        for each in copies:
            assert Watch.of(each) is None
            train(each, drawn(1))
        assert logged(watching.step()).layers == ()


def test_a_model_that_calls_itself_counts_as_a_whole() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.MultiheadAttention(12, 3, batch_first=True) for _ in "ab")

        def forward(self, x: Tensor, depth: int = 1) -> Tensor:
            x = self.a(x, x, x, need_weights=False)[0]
            if depth:
                x = self(x, depth - 1)
            return self.b(x, x, x, need_weights=False)[0]

    model = Twice().train()
    with attemper.watch(model) as watching:
        model(torch.randn(2, 5, 12)).sum().backward()
        record = logged(watching.step())
    assert [layer.name for layer in record.layers] == ["a", "a#1", "b", "b#1"]


def test_what_cannot_be_measured_does_not_stop_a_run() -> None:
    model = nn.TransformerEncoderLayer(12, 3, 7, batch_first=True, dropout=0.0).train()
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x[None],)).sum()

    with attemper.watch(model) as watching:
        torch.func.grad(loss)(parameters, torch.randn(5, 12))
        (remark,) = watching.unseen()
        assert "torch.func" in remark.reason
        model(torch.randn(2, 5, 12)).sum().backward()
        assert logged(watching.step()).layers[0].stats.rows.tolist() == [10] * 3


def test_a_layer_whose_heads_change_is_named_and_left_out() -> None:
    class Changing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    model = nn.Sequential(Changing()).train()
    with attemper.watch(model) as watching:
        watching.maxima()
        model(torch.randn(2, 3, 5, 7, requires_grad=True)).sum().backward()
        with pytest.warns(UserWarning, match="0 is not measured any more: it ran with different numbers of heads, 3 and 4"):
            model(torch.randn(2, 4, 5, 7, requires_grad=True)).sum().backward()
        with pytest.warns(UserWarning, match="no attention was measured in Sequential: 0: it ran with"):
            watching.step()


def test_steps_that_are_no_numbers_of_steps_are_refused() -> None:
    model = llama().train()
    with attemper.watch(model) as watching:
        for step in (-1, True, 1.5, "3", 2**63):
            with pytest.raises(ArgumentError, match=f"step: got {step!r}"):
                watching.step(step)  # pyrefly: ignore[bad-argument-type]
        for number in (-5, 2**63, True):
            with pytest.raises(ArgumentError, match="state: got"):
                watching.load_state_dict(watching.state_dict() | {"next": number})
    with pytest.raises(UnsupportedError, match="this watch was removed"):
        watching.step()
