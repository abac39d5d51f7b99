"""`ForwardPass`: what hooks on a model can tell of the pass that runs, however it ends."""

import contextlib

import pytest
import torch
from torch import nn

from attemper.monitor.forward_pass import ForwardPass
from attemper.monitor.hooks import Hook


class CallsItself(nn.Module):
    """Calls itself once with what is given, fails where it is told to, and goes on where the call inside failed."""

    def __init__(self, inside: type[BaseException] | None, outside: type[BaseException] | None) -> None:
        super().__init__()
        self.inside, self.outside = inside, outside

    def forward(self, x: torch.Tensor, inner: bool = False) -> torch.Tensor:
        if not inner:
            with contextlib.suppress(KeyboardInterrupt, ValueError):
                self(x, inner=True)
        fault = self.inside if inner else self.outside
        if fault is not None:
            raise fault("of this call")
        return x


class Followed:
    """Notes what a pass says of itself when hooks are called."""

    def __init__(self, model: nn.Module) -> None:
        self.current: ForwardPass | None = None
        self.said: list[tuple[str, ...]] = []
        model.register_forward_pre_hook(Hook(self.enter))
        model.register_forward_hook(Hook(self.leave), always_call=True)

    def enter(self, module: nn.Module, args: object) -> None:
        if self.current is not None and not self.current.over():
            self.said.append(("inside",))
        else:
            self.current = ForwardPass()
            self.said.append(("begins",))

    def leave(self, module: nn.Module, args: object, output: object) -> None:
        assert self.current is not None
        if self.current.ends():
            self.said.append(("ends", "raised" if self.current.raised() else "well"))


@pytest.mark.parametrize("inside", [None, ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("handling", [False, True])
def test_a_call_by_the_model_itself_ends_nothing(inside: type[BaseException] | None, handling: bool) -> None:
    model = CallsItself(inside, None)
    followed = Followed(model)
    if handling:
        try:
            int("what is handled around the pass")
        except ValueError:
            model(torch.zeros(1))
    else:
        model(torch.zeros(1))
    assert followed.said == [("begins",), ("inside",), ("ends", "well")]
    assert followed.current is not None
    assert followed.current.over()


def test_one_that_raises_says_so() -> None:
    model = CallsItself(None, ValueError)
    followed = Followed(model)
    with pytest.raises(ValueError, match="of this call"):
        model(torch.zeros(1))
    assert followed.said[-1] == ("ends", "raised")


def test_an_interrupted_one_is_over_though_no_hook_says_so() -> None:
    model = CallsItself(None, KeyboardInterrupt)
    followed = Followed(model)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt, match="of this call"):
            model(torch.zeros(1))
    assert followed.said == [("begins",), ("inside",)] * 2
