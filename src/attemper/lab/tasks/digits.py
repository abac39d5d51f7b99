"""Which digit an image shows: the 1797 handwritten digits of 8 × 8 pixels that come with scikit-learn."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from attemper.errors import LoadError, MissingExtraError
from attemper.lab.tasks.task import Batch

PINNED_SHA256 = "faf2d98f61250c1cdc0b114323133d3c58da04f5c5d28bb78e4bde3c936a75b1"
HELD_OUT_EVERY = 5  # of each class, every fifth image in the order of the data set
ROWS = 128


class Digits:
    """One of ten classes an image; pixels are scaled to mean 0 and variance 1 over the training images.

    Raises:
        MissingExtraError: scikit-learn is not installed. LoadError: its images are not those that this task was made with.
    """

    optimum = None
    classes, vocabulary, tokens = 10, 0, 16

    def __init__(self) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise MissingExtraError("scikit-learn", "lab", "read its images of digits") from None
        found = load_digits()
        images, labels = torch.tensor(found.images, dtype=torch.float32), torch.tensor(found.target, dtype=torch.int64)
        digest = hashlib.sha256(images.numpy().tobytes() + labels.numpy().tobytes()).hexdigest()
        if digest != PINNED_SHA256:
            raise LoadError(f"digits of scikit-learn: sha256 {digest}; expected {PINNED_SHA256}; install scikit-learn 1.5 or later")
        self.data = f"sklearn.datasets.load_digits, sha256 {digest}"
        held = torch.zeros(len(labels), dtype=torch.bool)
        for digit in range(self.classes):
            held[(labels == digit).nonzero()[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY, 0]] = True
        mean, std = images[~held].mean(), images[~held].std()
        images = (images - mean) / std
        self._train = images[~held], labels[~held, None]
        self._held_out = images[held], labels[held, None]

    def batch(self, size: int, generator: torch.Generator) -> Batch:
        """Images drawn with replacement."""
        images, labels = self._train
        chosen = torch.randint(len(images), (size,), generator=generator)
        return Batch({"images": images[chosen]}, labels[chosen])

    def validation(self, length: int | None = None) -> Sequence[Batch]:
        """All held-out images.

        Raises:
            LoadError: another length is asked for; images have one size.
        """
        if length not in (None, self.tokens):
            raise LoadError(f"digits of length {length}: expected {self.tokens} patches, which every image has")
        images, labels = self._held_out
        return [Batch({"images": part}, label) for part, label in zip(images.split(ROWS), labels.split(ROWS), strict=True)]
