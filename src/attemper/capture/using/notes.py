"""What became of each attention module of a model in use: the records, and the notes that its parts keep while it runs."""

from collections import Counter
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Replaced:
    """A module whose attention is attemper's.

    Attributes:
        module: its name in the model.
        how: the way that its calls take.
    """

    module: str
    how: str


@dataclass(frozen=True)
class Kept:
    """A module, or some calls of it, left as they were.

    Attributes:
        module: its name in the model.
        reason: why.
    """

    module: str
    reason: str


class Notes:
    """Notes of one model in use: what `find_unseen` asks of a watcher, and more.

    Attributes:
        impl: kernel of `attemper.attention`.
        replaced: module → how. kept: module → reason, decided before the model ran.
        refused: module → reason of a call that was left alone.
        softmaxes: module → reason, of those whose own code ran a softmax over logits.
        covered: modules that all is said about. watched: modules with hooks; ran: how often each of them ran.
    """

    def __init__(self, impl: str) -> None:
        self.impl = impl
        self.replaced: dict[str, str] = {}
        self.kept: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self.softmaxes: dict[str, str] = {}
        self.doubts: list[tuple[str, Tensor, str]] = []  # none: nothing is read out of the model's own code
        self.covered: set[str] = set()
        self.ran: Counter[str] = Counter()
        self.watched: set[str] = set()

    def replace(self, name: str, how: str) -> None:
        """Note a module whose calls are replaced."""
        if name not in self.replaced:
            self.replaced[name] = how
            self.cover(name)

    def keep(self, name: str, reason: str) -> None:
        """Note a module that is left as it was."""
        self.kept[name] = reason
        self.cover(name)

    def cover(self, name: str) -> None:
        """Nothing is left to say about this module, and those around it."""
        while name not in self.covered:
            self.covered.add(name)
            name = name.rpartition(".")[0]

    def refuse(self, name: str, reason: str) -> None:
        """Note a call that was left alone."""
        if name not in self.refused:
            self.refused[name] = reason
