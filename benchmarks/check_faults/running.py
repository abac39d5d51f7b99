"""Runs: each kind of fault in each architecture that it makes sense in, and every architecture as its authors made it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from attemper.report import Severity
from benchmarks.check_faults.kinds import KNOWN, Kind
from benchmarks.check_faults.models import ROWS, TOKENS, build
from benchmarks.check_faults.planting import NotApplicableError


@dataclass(frozen=True)
class Outcome:
    """One kind of fault in all architectures.

    Attributes:
        found, missed: architectures in which it was planted, and named or not named.
        not_applicable: those in which it makes no sense, or which leave no place to plant it.
    """

    kind: Kind
    found: tuple[str, ...]
    missed: tuple[str, ...]
    not_applicable: tuple[str, ...]

    @property
    def tried(self) -> int:
        """In how many architectures it was planted."""
        return len(self.found) + len(self.missed)

    def why(self, name: str) -> str | None:
        """Why it is known not to be found in this architecture; None if that is not known."""
        return KNOWN.get((self.kind.name, name)) or KNOWN.get((self.kind.name, ""))

    @property
    def unknown(self) -> tuple[str, ...]:
        """Misses that nobody knew of."""
        return tuple(name for name in self.missed if self.why(name) is None)

    @property
    def struck(self) -> tuple[str, ...]:
        """Architectures of the list of known misses in which it is found now."""
        return tuple(name for name in self.found if self.why(name) is not None)


@dataclass(frozen=True)
class Sound:
    """A sound model: its name, dtype and padding, and what was found all the same."""

    name: str
    dtype: str
    padding: str
    errors: tuple[str, ...]
    warnings: tuple[str, ...]


def plant(kind: Kind, names: Iterable[str]) -> Outcome:
    """Put the fault into a fresh model of each architecture and check it."""
    found, missed, not_applicable = [], [], []
    for name in names:
        padding = kind.padding or ("left" if ROWS[name].kind == "decoder" else "right")
        tiny = build(name, padding=padding, **kind.config(name))
        try:
            with kind.plant(tiny) as modules:
                report = tiny.check()
        except NotApplicableError:
            not_applicable.append(name)
        else:
            (found if kind.is_in(report, modules) else missed).append(name)
    return Outcome(kind, tuple(found), tuple(missed), tuple(not_applicable))


def sound(name: str) -> list[Sound]:
    """One architecture without any fault: in float32 with each padding that its inputs can have, and in bfloat16."""
    paddings: Sequence[str] = ("none", "right", "left") if ROWS[name].kind in TOKENS else ("right",)
    runs = [(torch.float32, padding) for padding in paddings] + [(torch.bfloat16, "right")]
    return [_sound(name, dtype, padding) for dtype, padding in runs]


def _sound(name: str, dtype: torch.dtype, padding: str) -> Sound:
    report = build(name, padding=padding, dtype=dtype).check()
    said = {
        severity: tuple(f"{f.code} {f.module}: {f.message}" for f in report.findings if f.severity is severity)
        for severity in Severity
    }
    return Sound(name, str(dtype).removeprefix("torch."), padding, said[Severity.ERROR], said[Severity.WARNING])
