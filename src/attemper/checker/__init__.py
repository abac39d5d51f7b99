"""`check`: looks at the attention of a model while it runs, and says what is wrong with it."""

from attemper.checker.codes import RULES, Rule, rule
from attemper.checker.run import check

__all__ = ["RULES", "Rule", "check", "rule"]
