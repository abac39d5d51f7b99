"""What the lab's models learn: real data that comes with Python or scikit-learn, and two synthetic tasks."""

from attemper.lab.config import Task as TaskConfig
from attemper.lab.tasks.task import IGNORED, Batch, Task

__all__ = ["IGNORED", "Batch", "Task", "load_task"]


def load_task(config: TaskConfig) -> Task:
    """The task that a configuration names, its data read and split.

    Raises:
        LoadError: the data is not there, too short, or not what it should be. MissingExtraError: a package for it is absent.
    """
    match config.name:
        case "text":
            from attemper.lab.tasks.text import Text, read_text

            corpus, name = read_text(config.path)
            return Text(corpus, config.length, name)
        case "digits":
            from attemper.lab.tasks.digits import Digits

            return Digits()
        case "recall":
            from attemper.lab.tasks.synthetic import Recall

            return Recall(config.symbols, config.length)
        case "reversal":
            from attemper.lab.tasks.synthetic import Reversal

            return Reversal(config.symbols, config.length)
