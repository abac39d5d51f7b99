"""The functions that transformers' attention interface calls in a model in use, and their mask functions.

What they must hold:
- a call is computed as the function that the model had before would have computed it, from the very mask that it would have
  been given; so there are two names, one for models that ran their own eager code and one for all others;
- a call that cannot be described goes to that function, and is noted;
- a module that is not in use (two models may share one config) gets that function too;
- torch.compile can trace all of it.
"""

import contextlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attemper.capture.huggingface import OWN
from attemper.capture.interface import Asked, Form, asked, form_of, indescribable
from attemper.capture.model_code import eager_of
from attemper.capture.traced import TOKEN, see
from attemper.capture.using.notes import Notes
from attemper.errors import ArgumentError
from attemper.ops import attention, attention_with_weights

NAMES = {"sdpa": "attemper", "eager": "attemper_eager"}  # what a model is switched to, by what its code takes it for
MARK = "_attemper_interface"
HOW = "through transformers' attention interface"


@dataclass
class InterfaceCall:
    """What a module in use carries: its name, how its calls are read, and where to note what became of them.

    Attributes:
        sure: its code makes such calls; else it is noted as replaced when it has made one.
    """

    name: str
    form: Form
    plain: Callable[..., Any]
    notes: Notes
    sure: bool = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        register()  # a model in use that was pickled finds its functions where it is loaded


def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
    """Attention of a model whose masks may leave the causal rule to the function, as those for SDPA do."""
    call = getattr(module, MARK, None)
    plain = plain_sdpa() if call is None else call.plain
    return _attend(call, plain, module, query, key, value, attention_mask, kwargs)


def attend_as_eager(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
    """Attention of a model whose masks say everything, as those for its own eager code do."""
    call = getattr(module, MARK, None)
    plain = eager_of(module) if call is None else call.plain
    return _attend(call, plain, module, query, key, value, attention_mask, kwargs)


def _attend(
    call: InterfaceCall | None,
    plain: Any,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    kwargs: dict[str, Any],
) -> Any:
    if call is None:
        return plain(module, query, key, value, attention_mask, **kwargs)
    given = {"module": module, "query": query, "key": key, "value": value, "attention_mask": attention_mask, **kwargs}
    weights_wanted = kwargs.get("output_attentions") or _collected()
    reason = indescribable(call.form, given)
    if reason is None and weights_wanted and call.form.sinks is not None:
        reason = "its weights were asked for, which models with sinks give in ways of their own"
    if reason is None:
        try:
            with _past_function_modes(query, key, value):
                output = _computed(module, asked(call.form, given), bool(weights_wanted), call.notes.impl)
        except ArgumentError as error:  # the model's own function takes it, or refuses it in its own words
            reason = str(error)
        else:
            if not call.sure:
                call.notes.replace(call.name, HOW)
            return output
    call.notes.refuse(call.name, f"{reason}; it called what it would have called without attemper")
    return plain(module, query, key, value, attention_mask, **kwargs)


def _computed(module: nn.Module, found: Asked, weights_wanted: bool, impl: str) -> tuple[Tensor, Tensor | None]:
    """Output, [batch, queries, heads, width], and weights, [batch, heads, queries, keys], if they are wanted."""
    arguments = (found.query, found.key, found.value, found.mask, found.dropout_p, found.is_causal)
    options = {
        "scale": found.scale,
        "enable_gqa": found.query.shape[1] != found.key.shape[1],
        "softcap": found.softcap,
        "sinks": found.sinks,
    }
    if weights_wanted:
        output, weights, _ = attention_with_weights(*arguments, **options)
    elif torch.compiler.is_compiling() and module.__dict__.get(TOKEN) is not None:
        output, rows = attention(*arguments, **options, return_stats=True, impl=impl)
        weights = None
        see(module, found, rows)
    else:
        output, weights = attention(*arguments, **options, impl=impl), None
    return output.transpose(1, 2).contiguous(), weights


def _past_function_modes(*tensors: Tensor) -> AbstractContextManager[object]:
    """A region past torch function modes, such as capture's own, which hears of the call otherwise: each function costs there.

    Not for a compiler, nor where a subclass wants to be asked.
    """
    if torch.compiler.is_compiling() or any(type(tensor) is not Tensor for tensor in tensors):
        return contextlib.nullcontext()
    return torch._C.DisableTorchFunction()


def _collected() -> bool:
    """Whether transformers collects weights from the module that runs; not every model hands the request down to us."""
    if torch.compiler.is_compiling():  # it does not collect there
        return False
    collector = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    wanted = None if collector is None else collector.get()
    return wanted is not None and any("attentions" in name for name in wanted)


def form_for(kind: str, plain: Callable[..., Any]) -> Form:
    """How a call is read that goes to `plain` without us. (Transformers' SDPA function refuses a softcap; ours takes it.)"""
    form = form_of(kind, plain)
    return form if kind == "eager" else form._replace(softcap=True)


def plain_sdpa() -> Callable[..., Any]:
    """Transformers' function around F.scaled_dot_product_attention."""
    return _interface()._global_mapping["sdpa"]


def register() -> None:
    """Tell transformers of the two names, and of the mask functions that go with them."""
    from_masks = sys.modules.get("transformers.masking_utils")
    if from_masks is None:
        return
    masks = from_masks.AttentionMaskInterface
    for kind, function in (("sdpa", attend), ("eager", attend_as_eager)):
        _interface().register(NAMES[kind], function)
        masks.register(NAMES[kind], masks._global_mapping[kind])


def _interface() -> Any:
    return sys.modules["transformers.modeling_utils"].AttentionInterface


OWN.extend((attend, attend_as_eager))
