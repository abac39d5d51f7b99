"""From what a configuration says to the task."""

from __future__ import annotations

from attemper.lab import config
from attemper.lab.tasks.task import Task


def load_task(wanted: config.Task) -> Task:
    """The task of a configuration; the same one gives the same examples.

    Raises:
        ArgumentError: a length or a number of symbols does not fit. LoadError: the text cannot be read, or is none.
        MissingExtraError: scikit-learn is not installed, for "digits".
    """
    # Each by its own import: the digits need scikit-learn, which takes a second to load.
    if wanted.name == "text":
        from attemper.lab.tasks.text import Text

        return Text(wanted.length, wanted.path)
    if wanted.name == "digits":
        from attemper.lab.tasks.digits import Digits

        return Digits()
    if wanted.name == "recall":
        from attemper.lab.tasks.recall import Recall

        return Recall(wanted.length, wanted.symbols)
    from attemper.lab.tasks.reversal import Reversal

    return Reversal(wanted.length, wanted.symbols)
