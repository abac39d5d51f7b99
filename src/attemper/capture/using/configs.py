"""Hugging Face models: their attention modules are switched through the name in their config, and switched back.

What it must hold:
- a config is switched only if everything that reads it then behaves as it did before; else it is kept, with the reason;
- the name is in no saved file: transformers leaves it out of config.json;
- undone, each config holds what it held.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import nn

from attemper.capture.model_code import beyond, eager_of, interface_of, names_asked
from attemper.capture.using.attend import HOW, MARK, NAMES, InterfaceCall, form_for, plain_sdpa, register
from attemper.capture.using.notes import Notes

_FIELD = "_attn_implementation_internal"


class _User(NamedTuple):
    """A module that calls the interface."""

    name: str
    module: nn.Module


def switch(model: nn.Module, notes: Notes) -> Iterator[Callable[[], None]]:
    """Switch what can be, and note it; yields what undoes each step, once it is done."""
    if "transformers.modeling_utils" not in sys.modules:
        return
    register()
    users: dict[int, list[_User]] = {}
    configs: dict[int, Any] = {}
    for name, module in model.named_modules():
        if interface_of(module) is not None:
            config = getattr(module, "config", None)
            if not hasattr(config, _FIELD):
                notes.keep(name, "it calls transformers' attention interface and has no config that says which function")
                continue
            configs[id(config)] = config
            users.setdefault(id(config), []).append(_User(name, module))
    kinds: dict[int, str] = {}
    for key, config in configs.items():
        kind, reason = _choose(model, config, users[key])
        if reason is not None:
            for user in users[key]:
                notes.keep(user.name, reason)
            continue
        kinds[key] = kind
        for user in users[key]:
            yield _mark(user, kind, notes)
        yield _set(config, NAMES[kind])
    yield from _switch_around(model, configs, kinds)


def _choose(model: nn.Module, config: Any, users: list[_User]) -> tuple[str, str | None]:
    """As which kind of function ours will stand in, "sdpa" or "eager"; or the reason to keep them."""
    origin = getattr(config, _FIELD) or "eager"  # transformers takes None for eager
    if origin == "eager" and getattr(config, "output_attentions", False):
        return "", "its config has output_attentions=True, which transformers takes for 'eager' alone; ask for them in each call"
    if origin in NAMES.values():
        return "", "another model in use has the same config object; give this one its own, by copy.deepcopy"
    if origin not in ("eager", "sdpa", "flex_attention") and not origin.startswith("flash_attention"):
        return "", f"its attention implementation, {origin!r}, is none of transformers' own"
    readers = [module for module in model.modules() if getattr(module, "config", None) is config]
    asked = set().union(*(names_asked(module) for module in readers))
    # Where the code asks whether the name is "sdpa", a name of ours is taken for eager, and the other way round.
    wanted = ["eager", "sdpa"] if origin == "eager" else ["sdpa", "eager"]
    if not all(getattr(module, "_supports_sdpa", True) for module in readers):
        wanted = ["eager"]
    kinds = [kind for kind in wanted if kind not in asked]
    if not kinds:
        return "", "its code asks by name for transformers' own functions, and computes something else for any other name"
    kind = kinds[0]
    if kind == "eager":
        for user in users:
            eager = eager_of(user.module)
            if eager is None:
                return "", "its eager attention function was not found, which would say what it computes"
            more = beyond(eager, form_for("eager", eager))
            if more:
                return "", f"its eager attention function {eager.__name__} uses {', '.join(more)}, which attemper does not know"
    return kind, None


def _mark(user: _User, kind: str, notes: Notes) -> Callable[[], None]:
    plain = eager_of(user.module) if kind == "eager" else plain_sdpa()
    assert plain is not None
    # A forward that somebody put over the class's may ask the interface, or call the class's, or do neither.
    sure = "forward" not in user.module.__dict__
    user.module.__dict__[MARK] = InterfaceCall(user.name, form_for(kind, plain), plain, notes, sure)
    if sure:
        notes.replace(user.name, HOW)
    return _Unmark(user.module)


def strayed(model: nn.Module) -> dict[str, str]:
    """Modules whose config somebody has given another name since, and the reason to call them kept."""
    names = {name: getattr(module.config, _FIELD, None) for name, module in model.named_modules() if MARK in module.__dict__}
    return {
        name: f"its attention implementation was set to {found!r} while it was in use; undo(), and use() again"
        for name, found in names.items()
        if found not in NAMES.values()
    }


def _switch_around(model: nn.Module, configs: dict[int, Any], kinds: dict[int, str]) -> Iterator[Callable[[], None]]:
    """Configs of the models around, which may build the masks for those inside: to the one name that all below them have."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if id(config) in configs or not hasattr(config, _FIELD) or getattr(config, "output_attentions", False):
            continue
        below = {id(getattr(inner, "config", None)) for inner in module.modules()} & {*configs}
        found = {kinds.get(key, "") for key in below}  # "" is one that is kept
        if found in ({"sdpa"}, {"eager"}):
            (kind,) = found
            configs[id(config)], kinds[id(config)] = config, kind
            yield _set(config, NAMES[kind])


def _set(config: Any, name: str) -> Callable[[], None]:
    restore = _Restore(config, getattr(config, _FIELD), name)
    setattr(config, _FIELD, name)
    return restore


class _Restore:
    """Puts a config's name back, unless somebody has set another since."""

    def __init__(self, config: Any, before: str | None, ours: str) -> None:
        self.config, self.before, self.ours = config, before, ours

    def __call__(self) -> None:
        if getattr(self.config, _FIELD) == self.ours:
            setattr(self.config, _FIELD, self.before)


class _Unmark:
    """Takes the mark off a module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self) -> None:
        self.module.__dict__.pop(MARK, None)
