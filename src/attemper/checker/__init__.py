"""`check`: looks at the attention of a model while it runs, and says what is wrong with it; `compare`: of two models."""

from attemper.checker.codes import BY_CODE, RULES, Rule, rule
from attemper.checker.comparing import Comparison, compare
from attemper.checker.run import check

__all__ = ["BY_CODE", "RULES", "Comparison", "Rule", "check", "compare", "rule"]
