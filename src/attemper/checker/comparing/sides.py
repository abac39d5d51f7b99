"""The two models that are compared: loaded, brought to an implementation of attention, each with inputs in its dtype."""

import copy
import os
from dataclasses import replace
from typing import Any

from torch import nn

from attemper.checker.load import Subject, load
from attemper.checker.options import Options, one_line
from attemper.errors import ArgumentError, LoadError


def load_two(
    a: "str | os.PathLike[str] | nn.Module",
    b: "str | os.PathLike[str] | nn.Module | None",
    attn: tuple[str, str] | None,
    dtypes: tuple[str, str] | None,
    options: Options,
) -> tuple[Subject, Subject]:
    """Both sides; b None: A a second time, which needs something that differs.

    Raises:
        ArgumentError: nothing would differ. LoadError: see `load`; or an implementation that the model does not take.
    """
    for name, pair in (("attn", attn), ("dtypes", dtypes)):
        if pair is not None and (isinstance(pair, str) or len(pair) != 2):
            raise ArgumentError(name, repr(pair), "two of them, for A and for B")
    if b is None and attn is None and dtypes is None:
        raise ArgumentError("b", "None", "a second model, or attn or dtypes: two ways of running the first")
    if b is None:
        b = copy.deepcopy(a) if isinstance(a, nn.Module) else a
    wanted = [replace(options, dtype=dtype) for dtype in dtypes or (options.dtype, options.dtype)]
    names = attn or (None, None)
    one, two = (_with_attention(load(model, each), name) for model, each, name in zip((a, b), wanted, names, strict=True))
    return one, two


def _with_attention(subject: Subject, attn: str | None) -> Subject:
    if attn is None:
        return subject
    if "/" in attn:
        raise LoadError(f"attn: {attn!r} names code on the Hub, which is not fetched; expected the name of an implementation")
    switch: Any = getattr(subject.model, "set_attn_implementation", None)
    if switch is None or subject.config is None:
        raise LoadError(f"attn: {subject.name} has no implementations to choose from; expected a Hugging Face model")
    try:
        switch(attn)
    except Exception as error:
        raise LoadError(f"attn: {subject.name} does not take {attn!r}: {one_line(error)}") from error
    got = subject.config._attn_implementation
    if got != attn:
        raise LoadError(f"attn: {subject.name} does not take {attn!r}; it stays with {got!r}")
    return replace(subject, name=f"{subject.name} ({attn})")
