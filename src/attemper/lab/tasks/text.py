"""Next byte of a text: the help topics that come with Python, or text of one's own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from attemper.errors import LoadError
from attemper.examples.text import Corpus, load_corpus, split, unique_paragraphs
from attemper.lab.tasks.task import Batch

VALIDATION_ROWS = 256  # at most, of as many bytes as a training example
ROWS = 64  # in a batch of validation


class Text:
    """Every byte is scored, given those before it.

    Args:
        corpus: the two splits. length: bytes of an example. name: of the data.

    Raises:
        LoadError: a split is shorter than one example.
    """

    optimum = None
    vocabulary = classes = 256

    def __init__(self, corpus: Corpus, length: int, name: str) -> None:
        for part, text in (("training", corpus.train), ("held-out", corpus.validation)):
            if len(text) < length + 2:
                raise LoadError(
                    f"{name}: its {part} part has {len(text)} bytes; expected at least {length + 2}, task.length = {length} and "
                    "two more; give more text or a smaller length"
                )
        self.tokens = length
        self.data = f"{name}, sha256 {corpus.sha256}"
        self._train, self._held_out = as_tensor(corpus.train), as_tensor(corpus.validation)

    def batch(self, size: int, generator: torch.Generator) -> Batch:
        """Pieces of the training text from anywhere."""
        starts = torch.randint(len(self._train) - self.tokens, (size, 1), generator=generator)
        return _shifted(self._train[starts + torch.arange(self.tokens + 1)])

    def validation(self, length: int | None = None) -> Sequence[Batch]:
        """The held-out text from its beginning, in pieces side by side; as many bytes whatever the length, as far as there are."""
        length = self.tokens if length is None else length
        whole = (len(self._held_out) - 1) // length
        if whole < 1:
            raise LoadError(f"{self.data}: its held-out part has {len(self._held_out)} bytes; expected more than {length}")
        rows = max(1, min(whole, VALIDATION_ROWS * self.tokens // length))
        starts = length * torch.arange(rows)[:, None]
        pieces = self._held_out[starts + torch.arange(length + 1)]
        return [_shifted(piece) for piece in pieces.split(ROWS)]


def _shifted(bytes_: Tensor) -> Batch:
    return Batch({"tokens": bytes_[:, :-1]}, bytes_[:, 1:])


def as_tensor(text: bytes) -> Tensor:
    """A text as int64 bytes, [tokens]."""
    return torch.tensor(list(text), dtype=torch.int64)


def read_text(path: str) -> tuple[Corpus, str]:
    """The corpus and its name: of a file, of a folder's `*.txt` and `*.md`, or, for "", of the running Python.

    A paragraph is kept where it first appears, so that none is in both splits.

    Raises:
        LoadError: there is no text, or it is not UTF-8.
    """
    if not path:
        return load_corpus(), "pydoc_data.topics"
    place = Path(path)
    if not place.exists():
        raise LoadError(f"task.path = {path!r}: nothing is there; expected a text file or a folder of them")
    files = sorted(file for file in place.rglob("*") if file.suffix in (".txt", ".md")) if place.is_dir() else [place]
    if not files:
        raise LoadError(f"task.path = {path!r}: a folder without *.txt or *.md; expected a text file or a folder of them")
    try:
        paragraphs = unique_paragraphs([file.read_text("utf-8") for file in files])
    except UnicodeDecodeError as error:
        raise LoadError(f"task.path = {path!r}: {error}; expected text in UTF-8") from error
    except OSError as error:
        raise LoadError(f"task.path = {path!r}: {error}; expected a text file or a folder of them") from error
    corpus = split_evenly(paragraphs)
    return corpus, place.name


def split_evenly(paragraphs: list[str]) -> Corpus:
    """As the help topics are split; a text of too few paragraphs for that gives its last tenth of them, at least one."""
    corpus = split(paragraphs)
    if corpus.validation or len(paragraphs) < 2:
        return corpus
    held = max(1, len(paragraphs) // 10)
    train, validation = ("\n\n".join(part).encode() for part in (paragraphs[:-held], paragraphs[-held:]))
    return Corpus(train, validation, hashlib.sha256(train + b"\0" + validation).hexdigest())
