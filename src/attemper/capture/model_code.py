"""Reading the code of a transformers model: which modules call the attention interface, with which eager function, and which
names of implementations their code asks for. Nothing is run.
"""

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from attemper.capture.interface import Form

# All that the eager functions of transformers 5 do, by the names in their code. One that does more is not known to be softmax
# attention with mask, bias, softcap and sinks, and its model is kept.
_KNOWN = {
    *("F", "nn", "torch", "functional", "getattr", "hasattr", "repeat_kv", "num_key_value_groups", "head_dim", "sinks"),
    *("matmul", "softmax", "dropout", "training", "tanh", "max", "values", "logsumexp", "sigmoid", "cat", "maybe_autocast"),
    *("transpose", "contiguous", "reshape", "expand", "view", "unsqueeze", "size", "shape"),
    *("to", "type", "dtype", "float", "float32", "device"),
}
_PARAMETERS = {
    *("module", "query", "key", "value", "query_states", "key_states", "value_states", "attention_mask"),
    *("scaling", "dropout", "softcap", "position_bias", "sinks", "s_aux", "sliding_window", "kwargs"),
}


def interface_of(module: nn.Module) -> types.FunctionType | None:
    """The function of a module's class that asks the attention interface for its function, or None."""
    return _interface_of(type(module), inspect.getattr_static(type(module), "forward", None))


@functools.lru_cache(maxsize=4096)
def _interface_of(kind: type, forward: Any) -> types.FunctionType | None:  # forward: for the cache; it may be replaced
    interface = getattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface", ())
    for function in _functions(kind):
        names = function.__code__.co_names
        if "get_interface" in names and any(isinstance(function.__globals__.get(name), interface) for name in names):
            return function
    return None


def eager_of(module: nn.Module) -> Callable[..., Any] | None:
    """The eager function that it hands to the interface as the default."""
    asking = interface_of(module)
    if asking is None:
        return None
    for name in asking.__code__.co_names:
        found = asking.__globals__.get(name)
        if "eager" in name and callable(found):
            return found
    return None


def beyond(eager: Callable[..., Any], form: Form) -> list[str]:
    """What an eager function names that is not known: of things it calls, and of its own parameters."""
    code = getattr(inspect.unwrap(eager), "__code__", None)
    if code is None:
        return ["code that cannot be read"]
    return sorted({*code.co_names} - _KNOWN | {*form.names} - _PARAMETERS)


def names_asked(module: nn.Module) -> set[str]:
    """Which of "eager" and "sdpa" the code of a module compares its config's implementation with."""
    own = getattr(module.__dict__.get("forward"), "__func__", module.__dict__.get("forward"))
    found = _names_in(own) if isinstance(own, types.FunctionType) else set()
    return found | _names_asked(type(module), inspect.getattr_static(type(module), "forward", None))


@functools.lru_cache(maxsize=4096)
def _names_asked(kind: type, forward: Any) -> set[str]:
    return set().union(*map(_names_in, _functions(kind)))


def _names_in(function: types.FunctionType) -> set[str]:
    code = function.__code__
    if "_attn_implementation" not in {*code.co_names, *code.co_consts}:
        return set()
    constants = [each for const in code.co_consts for each in (const if isinstance(const, tuple | frozenset) else (const,))]
    return {each for each in constants if isinstance(each, str)} & {"eager", "sdpa"}


def _functions(kind: type) -> Iterator[types.FunctionType]:
    """Every function of a class and of those it inherits from, up to torch's; nothing that a subclass overrides."""
    seen: set[str] = set()
    for owner in kind.__mro__:
        if owner.__module__.partition(".")[0] == "torch" or owner.__module__ == "transformers.modeling_utils":
            continue
        for name, thing in vars(owner).items():
            thing = inspect.unwrap(thing) if callable(thing) else thing
            if isinstance(thing, types.FunctionType) and name not in seen:
                seen.add(name)
                if name != "__init__":
                    yield thing
