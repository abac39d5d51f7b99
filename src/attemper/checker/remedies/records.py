"""What `fix` is asked for and what it says, as plain records."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from attemper.errors import ArgumentError
from attemper.report import Report
from attemper.report.schema import to_json
from attemper.weights import Clip

SCHEMA = 1


@dataclass(frozen=True)
class Picks:
    """The remedies that the user picked.

    Attributes:
        clip: what no head's scale · product should exceed; None: nothing is clipped.
        fold: (from, to), each a number or "none", "inverse-sqrt", "inverse"; None: nothing is folded.
    """

    clip: float | None = None
    fold: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        if self.clip is not None and not (math.isfinite(self.clip) and self.clip > 0):
            raise ArgumentError("clip", self.clip, "a finite number above 0, such as 100")

    @property
    def any(self) -> bool:
        """Whether anything was picked."""
        return self.clip is not None or self.fold is not None


@dataclass(frozen=True)
class Proposal:
    """A remedy that fits findings of the check.

    Attributes:
        codes: of the findings; places: how many they are.
        option: what to pass; words: what it would do.
    """

    codes: tuple[str, ...]
    places: int
    option: str
    words: str


@dataclass(frozen=True)
class Changed:
    """One tensor of the checkpoint that was edited.

    Attributes:
        tensor: its name in the file; dtype: in which it is stored.
        least: the smallest factor. rounding: largest relative error of a new number, from writing it in that dtype.
    """

    tensor: str
    dtype: str
    least: float
    rounding: float


@dataclass(frozen=True)
class OutputChange:
    """How far the outputs moved on the inputs of the check, over real positions, computed in the dtype of the check.

    Attributes:
        what: "logits" (over the vocabulary) or "hidden states".
        positions: how many were compared. largest: of the differences; typical: root mean square of the outputs before.
        relative: norm of the difference by norm of the outputs before.
        kl, kl_largest: divergence of the distributions after from those before, in nats, mean and largest; or None.
        loss_before, loss_after: mean cross entropy of the next token; None where the model does not predict it.
    """

    what: str
    positions: int
    largest: float
    typical: float
    relative: float
    kl: float | None = None
    kl_largest: float | None = None
    loss_before: float | None = None
    loss_after: float | None = None


@dataclass(frozen=True)
class FixReport:
    """What `fix` did, or would do.

    Attributes:
        model: what was fixed; out: where it was written, "" where nothing was.
        before: the check of the model; after: that of what was written, None where nothing was.
        proposals: remedies that fit the findings. picks: those that were asked for.
        clips: the heads that were clipped; changed: the tensors that were edited; settings: those of config.json that were set.
        outputs: how far the outputs moved; None where nothing was written.
        notes: what a reader should know. writable: False of what a factory built, which is in no folder.
    """

    model: str
    out: str
    before: Report
    proposals: tuple[Proposal, ...]
    picks: Picks
    after: Report | None = None
    clips: tuple[Clip, ...] = ()
    changed: tuple[Changed, ...] = ()
    settings: tuple[tuple[str, Any, Any], ...] = ()
    outputs: OutputChange | None = None
    notes: tuple[str, ...] = ()
    writable: bool = True

    def exit_code(self, fail_on: str = "error") -> int:
        """0; of what was written the code of its check: 1 with findings at or above `fail_on`, 3 without attention."""
        return 0 if self.after is None else self.after.exit_code(fail_on)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data: the attributes under their names, infinities as in `attemper.report.schema`."""
        plain = {name: _plain(getattr(self, name)) for name in ("picks", "proposals", "clips", "changed", "outputs")}
        return {
            "schema": SCHEMA,
            "model": self.model,
            "out": self.out,
            "writable": self.writable,
            **plain,
            "settings": [{"name": name, "before": old, "after": new} for name, old, new in self.settings],
            "before": self.before.to_dict(),
            "after": None if self.after is None else self.after.to_dict(),
            "notes": list(self.notes),
        }


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, (str, int, float)):
        return to_json(value)
    return {name: _plain(each) for name, each in asdict(value).items()}
