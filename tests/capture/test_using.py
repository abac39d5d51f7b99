"""The face of `use`: what it takes, what it refuses, and what it returns."""

import copy
import pickle
import sys

import pytest
import torch
from torch import nn

import attemper
from attemper.capture.using import Kept, Replaced, Use
from attemper.errors import ArgumentError, UnsupportedError
from attemper.ops import implementations
from tests.running import run


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"model: got list; expected a torch\.nn\.Module"):
        attemper.use([nn.Linear(2, 2)])  # pyrefly: ignore


def test_a_kernel_that_is_not_there_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(implementations.KERNELS, "triton", raising=False)
    with pytest.raises(ArgumentError, match=r"impl: got 'fast'; expected one of 'auto', 'reference'"):
        attemper.use(nn.Linear(2, 2), impl="fast")
    with pytest.raises(UnsupportedError, match=r"impl: 'triton' is not available \(.*\); available here: 'reference', 'blocked'"):
        attemper.use(nn.Linear(2, 2), impl="triton")


def test_a_model_or_a_part_of_it_is_in_use_once() -> None:
    model = nn.Sequential(nn.MultiheadAttention(4, 2), nn.Linear(4, 4))
    part = attemper.use(model[0])
    with pytest.raises(UnsupportedError, match=r"model: its part '0' is in use; undo\(\)"):
        attemper.use(model)
    part.undo()
    whole = attemper.use(model)
    assert Use.of(model) is whole
    for again in (model, model[1]):
        with pytest.raises(UnsupportedError, match=r"model: it is in use; undo\(\)"):
            attemper.use(again)
    whole.undo()
    whole.undo()
    assert Use.of(model) is None
    with attemper.use(model) as third:
        assert third.replaced == (Replaced("0", "as attemper.nn.MultiheadAttention, on the same parameters"),)
    assert type(model[0]) is nn.MultiheadAttention
    fourth = attemper.use(model)
    whole.undo()
    assert Use.of(model) is fourth


def test_what_fails_halfway_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise MemoryError("no more")

    layer = nn.TransformerEncoderLayer(4, 2, 4, batch_first=True)
    broken = nn.Sequential(nn.MultiheadAttention(4, 2), nn.TransformerEncoder(layer, 1))
    monkeypatch.setattr("attemper.capture.using.multihead._Dense", fail)
    with pytest.raises(MemoryError, match="no more"):
        attemper.use(broken)
    assert type(broken[0]) is nn.MultiheadAttention
    assert Use.of(broken) is None


def test_a_copy_of_a_part_is_no_more_than_that() -> None:
    model = nn.Sequential(nn.MultiheadAttention(4, 2), nn.Linear(100, 100))
    attemper.use(model)
    part = copy.deepcopy(model[0])
    assert isinstance(part, attemper.nn.MultiheadAttention)
    assert Use.of(part) is None
    assert len(pickle.dumps(model[0])) < 10_000
    with pytest.raises(UnsupportedError, match=r"model: it is in use"):
        attemper.use(part)


def test_what_is_attempers_already_is_kept_and_called_that() -> None:
    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return attemper.attention(x, x, x)

    model = nn.Sequential(attemper.nn.Block(4, 2), Attention())
    used = attemper.use(model)
    model(torch.randn(2, 3, 4))
    assert used.replaced == ()
    assert used.kept[0] == Kept("0.attention", "it is attemper's own already")
    assert used.kept[1].module == "1"
    assert "attemper.attention needs no replacing" in used.kept[1].reason


def test_a_part_taken_out_of_the_model_is_free_after_undo() -> None:
    model = nn.Sequential(nn.MultiheadAttention(4, 2), nn.MultiheadAttention(4, 2))
    used = attemper.use(model)
    part = model.pop(1)
    used.undo()
    with attemper.use(part) as again:
        assert [each.module for each in again.replaced] == [""]


def test_the_context_undoes_after_an_error() -> None:
    model = nn.MultiheadAttention(4, 2)
    with pytest.raises(ValueError, match="inside"), attemper.use(model):
        raise ValueError("inside")
    assert type(model) is nn.MultiheadAttention


def test_a_model_without_attention() -> None:
    used = attemper.use(nn.Linear(2, 2))
    assert (used.replaced, used.kept) == ((), ())
    assert repr(used) == "Use(replaced=0, kept=0)"


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_scripted_module_is_kept() -> None:
    class Script(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    model = nn.Sequential(torch.jit.trace(Script(), torch.randn(1, 2, 3, 4)))
    used = attemper.use(model)
    model(torch.randn(1, 2, 3, 4))
    assert used.kept[0].module == "0"
    assert "TorchScript" in used.kept[0].reason
    assert isinstance(used.kept[0], Kept)


def test_it_needs_no_optional_package() -> None:
    code = """
import sys
sys.modules["transformers"] = None
import torch, attemper
model = torch.nn.TransformerEncoderLayer(4, 2, 4)
print(len(attemper.use(model).replaced))
"""
    assert run(sys.executable, "-W", "ignore", "-c", code).split() == ["1"]
