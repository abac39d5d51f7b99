"""Text, read byte by byte: the next byte is to be told from those before it."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from attemper.errors import ArgumentError, LoadError
from attemper.examples.text import Corpus, load_corpus, split, unique_paragraphs
from attemper.lab.tasks.task import Batch

BYTES = 256
# Of the held-out text so many positions are looked at, spread over all of it: a loss every few steps must stay cheap.
SCORED = 2**14
_ROWS = 64
_FEWEST_PARAGRAPHS = 20


class Text:
    """Windows of a text, from places drawn uniformly; every byte but the first of a window is predicted.

    Sections of paragraphs are held out, every tenth one, after paragraphs that repeat were taken out: none is in both splits.

    Args:
        length: bytes that the model reads at once.
        path: a file, or a folder whose files are read in the order of their names; "": the help topics of the running Python,
            whose hash is in `data`, because they differ from version to version. UTF-8; what is not is read as Latin-1.

    Raises:
        LoadError: nothing there, no text, or too little of it.
    """

    classes = vocabulary = BYTES
    optimum: float | None = None

    def __init__(self, length: int, path: str = "") -> None:
        corpus = _own(Path(path)) if path else load_corpus()
        name = path or f"help topics of Python {platform.python_version()}"
        self.tokens = length
        self.data = f"{name}, sha256 {corpus.sha256}"
        self._train, self._held_out = (_as_tensor(part) for part in (corpus.train, corpus.validation))
        for part, bytes_ in (("to learn from", self._train), ("held out", self._held_out)):
            if len(bytes_) < length + 1:
                raise LoadError(
                    f"{name}: {len(bytes_)} bytes {part}; expected at least {length + 1}, one more than task.length; "
                    "give more text, or a shorter length"
                )

    def batch(self, size: int, generator: torch.Generator) -> Batch:
        """Windows of the text to learn from."""
        starts = torch.randint(len(self._train) - self.tokens, (size, 1), generator=generator)
        return _windows(self._train, starts, self.tokens)

    def validation(self, length: int | None = None) -> Sequence[Batch]:
        """Windows that do not overlap, at most 16384 positions in all, spread evenly over the held-out text."""
        length = self.tokens if length is None else length
        whole = (len(self._held_out) - 1) // length
        if whole < 1:
            raise ArgumentError("length", length, f"at most {len(self._held_out) - 1}: so many bytes are held out")
        wanted = min(whole, max(1, SCORED // length))
        starts = torch.arange(wanted) * whole // wanted * length
        return [_windows(self._held_out, rows.unsqueeze(1), length) for rows in starts.split(_ROWS)]


def _windows(text: Tensor, starts: Tensor, length: int) -> Batch:
    rows = text[starts + torch.arange(length + 1)]
    return Batch({"tokens": rows[:, :-1]}, rows[:, 1:])


def _as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int64)


def _own(path: Path) -> Corpus:
    try:
        if path.exists() and not (path.is_dir() or path.is_file()):  # a pipe, which one run would read, or a device without end
            raise LoadError(f"{path}: neither a file nor a folder; expected a text file, or a folder of them")
        files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
        texts = [_decoded(file, file.read_bytes()) for file in files]
    except (OSError, ValueError) as error:  # a name with a zero in it is no value
        reason = getattr(error, "strerror", None) or str(error)
        raise LoadError(f"{path}: {reason}; expected a text file, or a folder of them") from None
    paragraphs = unique_paragraphs(texts)
    if len(paragraphs) < _FEWEST_PARAGRAPHS:
        raise LoadError(
            f"{path}: {len(paragraphs)} different paragraphs; expected at least {_FEWEST_PARAGRAPHS}, set apart by empty lines, "
            "of which some are held out; give more text"
        )
    # Of a short text smaller sections, so that there are at least ten and the tenth can be held out.
    return split(paragraphs, min(12, len(paragraphs) // 10))


def _decoded(file: Path, data: bytes) -> str:
    if b"\0" in data:
        raise LoadError(f"{file}: it holds bytes of value 0; expected text; take it out of the folder, or convert it")
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1")
