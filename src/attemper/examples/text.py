"""The text that the example models learn from: CPython's own help topics, with repeats removed.

The topics ship with Python, so training needs no download; they change with its version, so the text is pinned by its hash.
They quote one another at length. A paragraph is therefore kept only where it first appears, which makes the two splits
disjoint paragraph by paragraph.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from attemper.errors import LoadError

PINNED_TEXT = "CPython 3.11.7"
PINNED_SHA256 = "b3112f7f184286262c8f453353e3ac4c6d97bb26626a4b2f7e9234718a184a1d"
VALIDATION_EVERY = 10
SECTION_PARAGRAPHS = 12


@dataclass(frozen=True)
class Corpus:
    """The two splits, and what identifies the text that they were cut from.

    Attributes:
        train: bytes to learn from.
        validation: bytes held out; no paragraph of it is in `train`.
        sha256: of both splits together.
    """

    train: bytes
    validation: bytes
    sha256: str


def load_corpus() -> Corpus:
    """Reads `pydoc_data.topics` of the running Python and splits it: of every ten sections the last is held out.

    Raises:
        LoadError: this Python came without its help topics.
    """
    try:
        from pydoc_data import topics
    except ImportError:
        raise LoadError(
            "pydoc_data.topics: not in this Python; expected its help topics; install a Python that has them"
        ) from None
    return split(unique_paragraphs([topics.topics[name] for name in sorted(topics.topics)]))


def unique_paragraphs(documents: list[str]) -> list[str]:
    """Paragraphs in order, each once; those that differ only in white space or case count as one."""
    first_of_kind: dict[str, str] = {}
    for document in documents:
        for paragraph in re.split(r"\n\s*\n", document):
            key = comparable(paragraph)
            if key:
                first_of_kind.setdefault(key, paragraph)
    return list(first_of_kind.values())


def comparable(paragraph: str) -> str:
    """A paragraph as it is compared: lower case, white space as single blanks."""
    return " ".join(paragraph.lower().split())


def split(paragraphs: list[str], size: int = SECTION_PARAGRAPHS) -> Corpus:
    """Cuts paragraphs into sections, of twelve if not told otherwise, and holds out every tenth section."""
    sections = [paragraphs[start : start + size] for start in range(0, len(paragraphs), size)]
    train, validation = [], []
    for number, section in enumerate(sections):
        target = validation if number % VALIDATION_EVERY == VALIDATION_EVERY - 1 else train
        target.append("\n\n".join(section))
    train_bytes, validation_bytes = ("\n\n".join(part).encode() for part in (train, validation))
    return Corpus(train_bytes, validation_bytes, hashlib.sha256(train_bytes + b"\0" + validation_bytes).hexdigest())
