"""`Report`: what `attemper.check` returns."""

from dataclasses import dataclass
from typing import Any, Self

from attemper.report.records import Outcome
from attemper.report.schema import outcome_fields, to_dict
from attemper.report.text import plain_text


@dataclass(frozen=True)
class Report(Outcome):
    """What `attemper.check` returns; as text, it is what the command prints. Its attributes are those of `Outcome`."""

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready data; the layout is described in `attemper.report.schema`."""
        return to_dict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The report that `to_dict` wrote.

        Args:
            data: what `to_dict` returned, or the same after JSON.

        Raises:
            ArgumentError: another version of the layout, or a part is missing.
        """
        return cls(**outcome_fields(data))

    def __str__(self) -> str:
        return plain_text(self)
