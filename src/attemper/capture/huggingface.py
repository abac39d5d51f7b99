"""Seam: the attention interface of Hugging Face transformers (5.0 and later).

A model asks `AttentionInterface.get_interface(name, its own eager function)` for the function to call. Capture wraps what
this returns and leaves the name alone. Registering a function under a name of our own, and switching the model to it, was
weighed and dropped: model code compares names ("eager", "sdpa") to choose masks and branches, so each comparison would have
to be forged, the mask function with it, and every nested config restored. Here the model builds the mask that it always
builds, the function that it always calls gets the very arguments that it always gets, and there is nothing to restore in the
model. Identity is tested on every architecture of the sweep all the same.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor

from attemper.capture.interface import Form, arguments, asked, form_of, indescribable, kind_of
from attemper.capture.record import Written
from attemper.capture.recorder import Recorder, crosses

# Functions of our own that are registered there: they call `attemper.attention`, which tells of its calls itself.
OWN: list[Callable[..., Any]] = []


@contextlib.contextmanager
def installed(recorder: Recorder) -> Generator[None]:
    """Wrap what `get_interface` returns, if transformers is loaded at all (no model of its can be there otherwise)."""
    modeling = sys.modules.get("transformers.modeling_utils")
    interface = getattr(modeling, "AttentionInterface", None)
    original = getattr(interface, "get_interface", None)
    if interface is None or original is None:
        yield
        return

    @functools.wraps(original)
    def get_interface(self: Any, attn_implementation: Any, default: Any) -> Callable[..., Any]:
        function = original(self, attn_implementation, default)
        if function in OWN:
            return function
        form = form_of(kind_of(attn_implementation, function, default), function)
        return functools.partial(_call, recorder, form, function)

    interface.get_interface = get_interface
    try:
        yield
    finally:
        interface.get_interface = original


def _call(recorder: Recorder, form: Form, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not recorder.listening:
        return function(*args, **kwargs)
    given = arguments(form, args, kwargs)
    reason = indescribable(form, given)
    if reason is not None:
        recorder.refuse(recorder.name_of(given.get("module")), reason)
        return function(*args, **kwargs)
    recorder.products = [] if form.kind == "eager" else None
    try:
        with recorder.quiet():  # sdpa inside is this same call
            output = function(*args, **kwargs)
        _tell(recorder, form, given, output)
    finally:
        recorder.products = None
    return output


def _tell(recorder: Recorder, form: Form, given: dict[str, Any], output: Any) -> None:
    module, products = given["module"], recorder.products
    name = recorder.name_of(module)
    cross = crosses(recorder, name) or bool(getattr(module, "is_cross_attention", False))
    with recorder.quiet(), torch.no_grad():
        call = asked(form, given)
    recorder.tell(
        name,
        seam="huggingface",
        query=call.query,
        key=call.key,
        value=call.value,
        attn_mask=call.mask,
        is_causal=call.is_causal,
        scale=call.scale,
        scale_given=given.get("scaling"),
        softcap=call.softcap,
        sinks=call.sinks,
        softcap_given=call.softcap_given,
        sinks_given=call.sinks_given,
        window=call.window,
        # Keys beyond the queries were there before them. (In a preallocated cache some come after; no rule uses it then.)
        offset=0 if cross else max(0, call.key.shape[2] - call.query.shape[2]),
        dropout_p=call.dropout_p,
        self_attention=not cross,
        output=_output(output, (*call.query.shape[:3], call.value.shape[3])),
        # The eager functions of transformers multiply the product, softmax(q @ k.mT * scaling); a few cast q and k before it.
        written=Written(products[0], scaled_first=False) if products else None,
    )


def _output(returned: Any, shape: tuple[int, ...]) -> Tensor | None:
    """[batch, heads, queries, d_v]; the interface returns it with heads behind queries."""
    output = returned[0] if isinstance(returned, tuple) and returned else returned
    if not isinstance(output, Tensor) or output.ndim != 4 or output.transpose(1, 2).shape != shape:
        return None
    return output.transpose(1, 2)
