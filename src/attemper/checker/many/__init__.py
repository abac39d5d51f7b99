"""`check --all`: many checkpoints, each in a process of its own, on this machine or on a Ray cluster."""

from attemper.checker.many.finding import find_models
from attemper.checker.many.records import ManyReport, ModelResult
from attemper.checker.many.run import check_many
from attemper.checker.many.text import plain_text

__all__ = ["ManyReport", "ModelResult", "check_many", "find_models", "plain_text"]
