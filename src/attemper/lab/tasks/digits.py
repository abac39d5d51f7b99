"""Handwritten digits: 1797 images of 8 × 8 that come with scikit-learn."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from attemper.errors import ArgumentError, LoadError, MissingExtraError
from attemper.lab.tasks.task import Batch

PINNED_SHA256 = "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"
_EVERY = 5


class Digits:
    """Which of ten digits an image shows. Of each digit every fifth image is held out, so that both splits hold all alike.

    Images are divided by 16, their largest value, then brought to mean 0 and variance 1 by two numbers for all pixels.

    Raises:
        MissingExtraError: scikit-learn is not installed. LoadError: its digits are not those that are known.
    """

    classes, vocabulary, tokens = 10, 0, 16
    optimum: float | None = None

    def __init__(self) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise MissingExtraError("scikit-learn", "lab", "learn from its digits") from None
        flat, digits = load_digits(return_X_y=True)
        images = torch.tensor(flat, dtype=torch.float32).unflatten(1, (8, 8)) / 16
        labels = torch.tensor(digits, dtype=torch.int64)
        # Of small whole numbers, the same in any version that has the same data.
        sha256 = hashlib.sha256((images * 16).to(torch.uint8).numpy().tobytes() + labels.to(torch.uint8).numpy().tobytes())
        if sha256.hexdigest() != PINNED_SHA256:
            raise LoadError(
                f"scikit-learn's digits: sha256 {sha256.hexdigest()}; expected {PINNED_SHA256}; install another scikit-learn"
            )
        self.data = f"scikit-learn's digits, sha256 {PINNED_SHA256}"
        held_out = torch.zeros(len(labels), dtype=torch.bool)
        for digit in range(self.classes):
            held_out[(labels == digit).nonzero().flatten()[_EVERY - 1 :: _EVERY]] = True
        images = (images - images[~held_out].mean()) / images[~held_out].std()
        self._images, self._labels = images[~held_out], labels[~held_out].unsqueeze(1)
        self._held_out = Batch({"images": images[held_out]}, labels[held_out].unsqueeze(1))

    def batch(self, size: int, generator: torch.Generator) -> Batch:
        """Images to learn from, drawn uniformly with replacement."""
        chosen = torch.randint(len(self._labels), (size,), generator=generator)
        return Batch({"images": self._images[chosen]}, self._labels[chosen])

    def validation(self, length: int | None = None) -> Sequence[Batch]:
        """The held-out images.

        Raises:
            ArgumentError: of another length than 16 patches, which images have not.
        """
        if length not in (None, self.tokens):
            raise ArgumentError("length", length, f"{self.tokens}, the patches of an image")
        return [self._held_out]
