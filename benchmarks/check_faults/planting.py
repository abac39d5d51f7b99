"""How a fault gets into a model: between the model's code and the attention function that it calls, or below that function.

What must hold: the model's code is not edited; what is altered is what the model asks for, so a checker sees it as it would see
a wrong port; where a fault cannot be put into a model, it does not count as tried.
"""

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attemper.capture.record import HIDDEN
from benchmarks.check_faults.models import Tiny


class NotApplicableError(Exception):
    """The fault makes no sense in this architecture, or there is no place in it to plant it."""


@dataclass(frozen=True)
class Call:
    """One call of transformers' attention interface, as the model makes it.

    Attributes:
        name: of the module that calls; module: itself.
        query, key, value: [batch, heads, tokens, width].
        mask: what the model passes, which may be None; visible: what it means, bool [batch or 1, heads or 1, queries, keys].
        more: the arguments by name, "scaling" among them.
    """

    name: str
    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    visible: Tensor
    more: dict[str, Any]

    @property
    def width(self) -> int:
        """Width of a head."""
        return self.query.shape[-1]

    @property
    def scale(self) -> float:
        """The factor that the called function puts on the product."""
        given = self.more.get("scaling")
        return self.width**-0.5 if given is None else given

    @property
    def sdpa(self) -> bool:
        """Whether the called function is the one that calls SDPA."""
        config: Any = self.module.config
        return config._attn_implementation == "sdpa"

    @property
    def is_self_attention(self) -> bool:
        """As many keys as queries, and no name that says it looks elsewhere."""
        crosses = any(word in self.name.lower() for word in ("cross", "encoder_attn", "encdec"))
        return self.query.shape[2] == self.key.shape[2] > 1 and not crosses

    @property
    def is_causal(self) -> bool:
        """Whether it is self-attention that hides all later keys."""
        return self.is_self_attention and not bool(self.visible.triu(1).any())

    def with_scale(self, scale: float) -> "Call":
        """Another factor, asked for in the same way."""
        return replace(self, more=self.more | {"scaling": scale})

    def with_visible(self, visible: Tensor) -> "Call":
        """Another mask, of the dtype that the model passes; a bias in it stays."""
        visible = visible.expand(self.query.shape[0], -1, self.query.shape[2], self.key.shape[2])
        if self.mask is None or self.mask.dtype == torch.bool:
            mask = visible if self.sdpa else torch.where(visible, 0.0, torch.finfo(self.query.dtype).min)
        else:
            bias = torch.where(self.mask > HIDDEN, self.mask, 0.0)
            mask = torch.where(visible, bias, torch.finfo(self.query.dtype).min)
        return replace(self, mask=mask)


Alter = Callable[[Call], Call | None]  # None: not here


@contextlib.contextmanager
def calls_altered(model: nn.Module, alter: Callable[[Call], Call]) -> Generator[None]:
    """What the model asks of transformers' attention interface passes through `alter`, before anybody else sees it."""
    names = {id(module): name for name, module in model.named_modules()}
    look_up = type(ALL_ATTENTION_FUNCTIONS).get_interface

    def get_interface(attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        # Through the class: a capture replaces the method there, and so it is given what comes out of here.
        function = type(ALL_ATTENTION_FUNCTIONS).get_interface(ALL_ATTENTION_FUNCTIONS, attn_implementation, default)
        eager = look_up(ALL_ATTENTION_FUNCTIONS, attn_implementation, default) is default

        def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any) -> Any:
            visible = _visible(module, query, key, mask, more, eager=eager)
            call = alter(Call(names[id(module)], module, query, key, value, mask, visible, more))
            return function(call.module, call.query, call.key, call.value, call.mask, **call.more)

        return attend

    ALL_ATTENTION_FUNCTIONS.get_interface = get_interface
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS.get_interface


@contextlib.contextmanager
def in_calls(tiny: Tiny, alter: Alter, where: str) -> Generator[frozenset[str]]:
    """Alter the calls that can be altered so: of "all" modules, or of the "last" one in which it is possible.

    Returns:
        The names of the modules whose calls are altered.

    Raises:
        NotApplicableError: there is no such call.
    """
    possible: dict[str, None] = {}

    def survey(call: Call) -> Call:
        if alter(call) is not None:
            possible[call.name] = None
        return call

    with torch.no_grad(), calls_altered(tiny.model, survey):
        tiny.model(**tiny.inputs)
    if not possible:
        raise NotApplicableError
    chosen = frozenset(possible if where == "all" else [*possible][-1:])

    def change(call: Call) -> Call:
        return (alter(call) if call.name in chosen else None) or call

    with calls_altered(tiny.model, change):
        yield chosen


def _visible(module: nn.Module, query: Tensor, key: Tensor, mask: Any, more: dict[str, Any], *, eager: bool) -> Tensor:
    if mask is not None:
        visible = mask if mask.dtype == torch.bool else mask > HIDDEN
        return visible[..., : key.shape[2]]
    everything = torch.ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool)
    given = more.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if given is None else given)
    return everything if eager or not causal else everything.tril()
