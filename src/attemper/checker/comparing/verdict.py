"""`Comparison`: what `compare` returns."""

from dataclasses import asdict, dataclass
from typing import Any

from attemper.checker.comparing.records import Outcome
from attemper.checker.comparing.text import plain_text
from attemper.stats.numbers import to_json

SCHEMA = 1


@dataclass(frozen=True)
class Comparison(Outcome):
    """What `compare` returns; as text, it is what the command prints. Its attributes are those of `Outcome`."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data: `schema` 1, and the attributes by name; infinities are the strings "inf" and "-inf", NaN is null."""
        unseen = [{"module": module, "reason": reason} for module, reason in self.unseen]
        return {"schema": SCHEMA, "equal": self.equal, **_ready(asdict(self)), "unseen": unseen}

    def __str__(self) -> str:
        return plain_text(self)


def _ready(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _ready(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_ready(each) for each in value]
    return to_json(value)
