"""What the lab's models learn: real data that comes with Python or scikit-learn, and two synthetic tasks."""

from attemper.lab.tasks.loading import load_task
from attemper.lab.tasks.task import IGNORED, Batch, Task

__all__ = ["IGNORED", "Batch", "Task", "load_task"]
