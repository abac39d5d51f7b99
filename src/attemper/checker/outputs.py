"""The outputs by position that the probes compare: the hidden states of a Hugging Face model, or what any other model returns."""

import contextlib
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

CACHES = ("cache", "past_key_values")  # what models call it, in arguments and in outputs; transformers' newer name first


@dataclass(frozen=True)
class Outputs:
    """What came out of one run.

    Attributes:
        final: the first floating-point tensor that the model returned; hidden: one with a row for each position.
        cache: what it returned under one of the names in `CACHES`, whatever that is, or None.
    """

    final: Tensor | None
    hidden: Tensor | None
    cache: Any = None


@dataclass
class Slot:
    """Where a hook puts what it saw."""

    value: Tensor | None = None


@contextlib.contextmanager
def hidden_states(model: nn.Module) -> Generator[Slot]:
    """Keep what the body of a Hugging Face model returns (its last hidden state), whatever head is on top of it."""
    slot = Slot()

    def keep(_module: nn.Module, _args: Any, output: Any) -> None:
        slot.value = first_float(output)

    handles = [body.register_forward_hook(keep) for body in bodies(model)]
    try:
        yield slot
    finally:
        for handle in handles:
            handle.remove()


def bodies(model: nn.Module) -> list[nn.Module]:
    """The modules below the head; some classes call the decoder past the base model (OPT), some name no base model (Llama 4)."""
    found = [getattr(model, "base_model", None)]
    with contextlib.suppress(AttributeError, NotImplementedError, TypeError):
        found.append(model.get_decoder())  # pyrefly: ignore
    bodies = dict.fromkeys(body for body in found if isinstance(body, nn.Module) and body is not model)
    return list(bodies)


def first_float(returned: Any) -> Tensor | None:
    """The first floating-point tensor in what a model returned."""
    if isinstance(returned, Tensor):
        return returned if returned.is_floating_point() else None
    parts = returned.values() if isinstance(returned, Mapping) else returned if isinstance(returned, (tuple, list)) else ()
    return next((found for part in parts if (found := first_float(part)) is not None), None)


def kept_cache(returned: Any) -> Any:
    """The cache that a model returned when asked for one: by name, else the one part that can be nothing else; None without."""
    named = returned if isinstance(returned, Mapping) else {}
    for name in CACHES:
        if (found := named.get(name, getattr(returned, name, None))) is not None:
            return found
    parts = list(returned.values()) if named else list(returned) if isinstance(returned, (tuple, list)) else []
    found = [part for part in parts if _is_cache(part)]
    return found[0] if len(found) == 1 else None


def _is_cache(part: Any) -> bool:
    """An object of transformers' kind, or keys and values by layer; a tensor by layer may be hidden states or weights as well."""
    if hasattr(part, "get_seq_length"):
        return True
    layers = list(part.values()) if isinstance(part, Mapping) else part if isinstance(part, (tuple, list)) else []
    return len(layers) > 0 and all(isinstance(layer, (tuple, list, Mapping)) and len(layer) > 0 for layer in layers)
