"""Numbers as JSON has them, which knows neither infinities nor not-a-number."""

import math
from typing import Any


def to_json(value: Any) -> Any:
    """Numbers as JSON has them: "inf" and "-inf" as strings, not-a-number as null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def from_json(value: Any) -> Any:
    """The number that `to_json` wrote; None stays None."""
    return float(value) if isinstance(value, str) else value
