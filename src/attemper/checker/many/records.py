"""What came of each model, as plain records."""

from dataclasses import dataclass
from typing import Any

SCHEMA = 1


@dataclass(frozen=True)
class ModelResult:
    """One model.

    Attributes:
        model: as it was named. exit: the exit code of its check, 2 also where its process was ended or crashed.
        seconds: how long it took. report: what `Report.to_dict` gave, None where there is none. error: why not, one line.
    """

    model: str
    exit: int
    seconds: float
    report: dict[str, Any] | None = None
    error: str = ""


@dataclass(frozen=True)
class ManyReport:
    """All of them, in the order in which they were named."""

    results: tuple[ModelResult, ...]

    def exit_code(self) -> int:
        """As linters do: 2 if any model could not be checked, else 1 if any has findings, else 0, or 3 if none had attention."""
        codes = {result.exit for result in self.results}
        return next((code for code in (2, 1, 0) if code in codes), 3)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data: schema, exit, and for each model: model, exit, seconds, error, report (the schema of one check)."""
        models = [
            {"model": each.model, "exit": each.exit, "seconds": each.seconds, "error": each.error, "report": each.report}
            for each in self.results
        ]
        return {"schema": SCHEMA, "exit": self.exit_code(), "models": models}
