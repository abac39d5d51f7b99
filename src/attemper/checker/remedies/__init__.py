"""`fix`: what check proposes and the user picks, done to the weights, written beside the model, and checked again."""

from attemper.checker.remedies.records import FixReport, OutputChange, Picks, Proposal
from attemper.checker.remedies.run import fix
from attemper.checker.remedies.text import plain_text

__all__ = ["FixReport", "OutputChange", "Picks", "Proposal", "fix", "plain_text"]
