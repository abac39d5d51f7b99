"""What each rule looks for, why it matters and what to do about it: one table for each family of codes."""

from attemper.checker.rules.health import HEALTH
from attemper.checker.rules.masks import MASKS
from attemper.checker.rules.numeric_range import RANGE
from attemper.checker.rules.scale import SCALE
from attemper.checker.rules.training import TRAINING
from attemper.report import Rule

RULES: tuple[Rule, ...] = (*SCALE, *RANGE, *HEALTH, *MASKS)  # what check looks for

__all__ = ["HEALTH", "MASKS", "RANGE", "RULES", "SCALE", "TRAINING"]
