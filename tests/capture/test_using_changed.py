"""Models that somebody has changed, before or while they are in use: parametrised, with another forward, undone in the middle."""

import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.overrides import _get_current_function_mode

import attemper
from attemper.capture.using import Replaced, attend, callers
from tests.capture.architectures import build

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

NEAR = {"rtol": 1e-5, "atol": 1e-5}


class Attention(nn.Module):
    """Self-attention whose projection is a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(33, 11))

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*F.linear(x, self.weight).chunk(3, -1))


def test_a_parametrized_caller_is_redirected() -> None:
    model = nn.Sequential(Attention(), Attention())
    parametrizations.weight_norm(model[1], "weight")
    used = attemper.use(model)
    model(torch.randn(2, 3, 11))
    assert used.replaced == (Replaced("0", callers.HOW), Replaced("1", callers.HOW))
    assert used.kept == ()


def test_a_forward_put_on_a_module_of_torch_is_redirected() -> None:
    model = nn.Sequential(nn.Identity())
    model[0].forward = lambda x: F.scaled_dot_product_attention(x, x, x)
    used = attemper.use(model)
    model(torch.randn(2, 3, 11))
    assert used.replaced == (Replaced("0", callers.HOW),)


def test_a_scripted_module_is_kept_where_transformers_is_loaded_too() -> None:
    import transformers.modeling_utils  # noqa: F401

    used = attemper.use(nn.Sequential(torch.jit.trace(Attention(), torch.randn(2, 3, 11))))
    assert [each.module for each in used.kept] == ["0"]


def test_undone_while_it_runs_nothing_stays() -> None:
    class Undoing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Attention(), Attention()

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            used.undo()
            return self.second(x)

    model = Undoing()
    used = attemper.use(model)
    model(torch.randn(2, 3, 11))
    assert used.replaced == (Replaced("first", callers.HOW),)
    assert _get_current_function_mode() is None


def _own_code(self: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
    return torch.softmax(hidden_states @ hidden_states.mT, -1) @ hidden_states, None


def _sdpa(self: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
    x = hidden_states[:, None]
    return F.scaled_dot_product_attention(x, x, x)[:, 0], None


def _as_before(self: Any, *args: Any, **kwargs: Any) -> Any:
    return type(self).forward(self, *args, **kwargs)


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("forward", "how"),
    [
        (_own_code, None),
        (_sdpa, callers.HOW),
        (_as_before, attend.HOW),
    ],
)
def test_a_model_of_transformers_with_a_forward_replaced_does_what_that_says(forward: Any, how: str | None, attn: str) -> None:
    model, inputs = build("llama", attn=attn)
    module = model.model.layers[1].self_attn
    module.forward = types.MethodType(forward, module)
    with torch.no_grad():
        plain = model(**inputs).logits[0]
        used = attemper.use(model)
        torch.testing.assert_close(model(**inputs).logits[0], plain, **NEAR)
    replaced = {each.module: each.how for each in used.replaced}
    assert replaced.get("model.layers.1.self_attn") == how
    assert "model.layers.0.self_attn" in replaced
    assert [each.module for each in used.kept] == (["model.layers.1.self_attn"] if how is None else [])


def test_a_forward_replaced_on_the_class_after_a_first_use_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build("llama")
    attemper.use(model).undo()
    monkeypatch.setattr(type(model.model.layers[0].self_attn), "forward", _own_code)
    with torch.no_grad(), attemper.use(model) as used:
        model(**inputs)
        assert used.replaced == ()
        assert len(used.kept) == 2
