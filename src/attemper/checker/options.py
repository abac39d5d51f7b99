"""How a check is to be run, as one object that is passed down."""

import re
from dataclasses import dataclass
from typing import Protocol

import torch

from attemper.checker.thresholds import DEFAULTS, Thresholds
from attemper.errors import ArgumentError

# What is never an answer about a model. A panic in Rust code is one and no `Exception`: catch BaseException, but not these.
ENDS = (KeyboardInterrupt, SystemExit, GeneratorExit)

_LONGEST = 300  # characters of another library's words

DTYPES = ("auto", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Options:
    """What the user asked for, apart from the model and its inputs.

    Attributes:
        dtype: what to compute in: one of `DTYPES`, or None: float32 for a checkpoint, and a module as it stands.
        allow_pickle: read pickled weights (with weights_only=True). trust_remote_code: run code that a checkpoint brings along.
        max_tokens: texts are cut to this many tokens (and to what the model can take).
        thresholds: the numbers that findings are decided by.
        passages: into how many passages a text is cut, each an input of its own; passage: which of them, from 0 on.
        max_memory: bytes that the process may take, None for no limit.
    """

    dtype: str | None = None
    allow_pickle: bool = False
    trust_remote_code: bool = False
    max_tokens: int = 2048
    thresholds: Thresholds = DEFAULTS
    max_memory: int | None = None
    passages: int = 1
    passage: int = 0

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ArgumentError("dtype", repr(self.dtype), f"one of {', '.join(DTYPES)}")
        if self.max_tokens < 2:
            raise ArgumentError("max_tokens", self.max_tokens, "2 tokens or more")
        if self.passages < 1:
            raise ArgumentError("passages", self.passages, "a whole number, 1 or more")

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The dtype asked for; None for "auto" and where nothing was asked for."""
        return None if self.dtype is None or self.dtype == "auto" else getattr(torch, self.dtype)


class Progress(Protocol):
    """What a check tells of itself while it runs."""

    def __call__(self, words: str, done: int = 0, total: int = 0) -> None:
        """A step in a few words; how much of it is done, of how much in all (0: not known)."""


def untold(words: str, done: int = 0, total: int = 0) -> None:
    """The `Progress` that nobody hears."""


def one_line(error: BaseException) -> str:
    """What another library's error says, as one line of bearable length, with its type; what is left out ends in "…"."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = _shortened(" ".join(lines))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _shortened(text: str) -> str:
    """Cut behind the last sentence that fits, or behind the last word where that would leave less than half."""
    if len(text) <= _LONGEST:
        return text
    ends = [found.end() for found in re.finditer(r"[.!?](?=\s)|\S(?=\s)", text[: _LONGEST - 1])]
    sentences = [end for end in ends if text[end - 1] in ".!?" and end > _LONGEST // 2]
    end = max(sentences or ends, default=_LONGEST - 2)
    return f"{text[:end]} …"
