"""A baseline: the findings that were there when somebody decided to live with them, so that only new ones fail.

A finding is old if the baseline has one with its code, module and call, of its severity or a graver one, that covers its heads;
and if it lies no more than `WORSE` times further beyond its threshold than then. Otherwise measured values are not compared:
they differ between machines.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from attemper.errors import LoadError
from attemper.report.records import Finding, Outcome, Severity
from attemper.stats.numbers import from_json, to_json

SCHEMA = 1
WORSE = 2.0
MAX_BYTES = 64 * 1024 * 1024
_FIELDS = ("code", "module", "call", "heads", "severity", "excess")

Report = TypeVar("Report", bound=Outcome)


@dataclass(frozen=True)
class Known:
    """One finding of a baseline.

    Attributes:
        code, module, call, heads, severity: as in `Finding`; no heads: all of the layer's.
        excess: how far beyond its threshold it lay, as `excess` says; None where there was no number.
    """

    code: str
    module: str
    call: int | None
    heads: tuple[int, ...]
    severity: Severity
    excess: float | None

    @property
    def place(self) -> tuple[str, str, int | None]:
        """What a finding must have in common with it."""
        return self.code, self.module, self.call


def excess(finding: Finding) -> float | None:
    """How far a finding lies beyond its threshold: measured / threshold or its inverse, whichever is above 1; three digits.

    Where the threshold is 0 it is what was measured. None where there is no number.
    """
    if finding.measured is None or math.isnan(finding.measured):
        return None
    measured, threshold = abs(finding.measured), abs(finding.threshold or 0.0)
    ratio = measured / threshold if threshold else measured
    return float(f"{max(ratio, 1 / ratio) if threshold and ratio else ratio:.3g}")


def known(findings: Iterable[Finding]) -> tuple[Known, ...]:
    """The baseline of these findings, sorted so that its file differs only where they do."""
    entries = {Known(f.code, f.module, f.call, tuple(sorted(f.heads)), f.severity, excess(f)) for f in findings}
    return tuple(sorted(entries, key=lambda k: (k.code, k.module, -1 if k.call is None else k.call, k.heads, k.severity)))


def written(entries: Iterable[Known]) -> str:
    """The text of a baseline file: JSON with one finding a line."""
    lines = [json.dumps({name: _plain(getattr(entry, name)) for name in _FIELDS}, allow_nan=False) for entry in entries]
    body = "".join(f"\n    {line}{',' if number < len(lines) else ''}" for number, line in enumerate(lines, 1))
    return f'{{\n  "schema": {SCHEMA},\n  "findings": [{body}{chr(10) + "  " if lines else ""}]\n}}\n'


def read(path: Path) -> tuple[Known, ...]:
    """The findings of a baseline file.

    Raises:
        LoadError: there is none, or it is not what `written` makes.
    """
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise LoadError(f"baseline {path} has {size} bytes; at most {MAX_BYTES} are accepted")
        data = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise LoadError(f"baseline {path} could not be read: {error.strerror}; --write-baseline makes one") from error
    except (ValueError, RecursionError) as error:
        raise LoadError(f"baseline {path} is not JSON; expected what --write-baseline wrote") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA or not isinstance(data.get("findings"), list):
        raise LoadError(f"baseline {path} is of another kind; expected what --write-baseline wrote (schema {SCHEMA})")
    return tuple(_entry(path, number, each) for number, each in enumerate(data["findings"], 1))


def compare(report: Report, entries: Sequence[Known], sought: Callable[[Known], bool] = lambda entry: True) -> Report:
    """The report with its old findings put aside, and a note where the baseline names some that are no longer there.

    Args:
        sought: whether this check would have found an entry, were it still there; of others nothing is said.
    """
    by_place: dict[tuple[str, str, int | None], list[Known]] = {}
    for entry in entries:
        by_place.setdefault(entry.place, []).append(entry)
    new, old, met = [], [], set()
    for finding in report.findings:
        covering = _covering(finding, by_place.get((finding.code, finding.module, finding.call), ()))
        (old if covering else new).append(finding)
        met.update(covering or by_place.get((finding.code, finding.module, finding.call), ()))
    gone = sum(entry not in met and sought(entry) for entry in entries)
    note = f"{gone} finding{' of the baseline is' if gone == 1 else 's of the baseline are'} no longer there; write it again"
    return replace(
        report, findings=tuple(new), suppressed=(*report.suppressed, *old), notes=(*report.notes, *((note,) if gone else ()))
    )


def _covering(finding: Finding, entries: Sequence[Known]) -> list[Known]:
    """The entries that together make the finding an old one; none if it is new."""
    order, now = list(Severity), excess(finding)
    fitting = [
        entry
        for entry in entries
        if order.index(entry.severity) <= order.index(finding.severity)
        and (now is None or (entry.excess is not None and now <= WORSE * entry.excess))
    ]
    whole = [entry for entry in fitting if not entry.heads]
    if whole:
        return whole
    heads = {head for entry in fitting for head in entry.heads}
    wanted = set(finding.heads)
    return [entry for entry in fitting if wanted & set(entry.heads)] if wanted and wanted <= heads else []


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Severity) else list(value) if isinstance(value, tuple) else to_json(value)


def _entry(path: Path, number: int, data: Any) -> Known:
    try:
        code, module, call, heads = data["code"], data["module"], data["call"], tuple(data["heads"])
        over, severity = from_json(data["excess"]), Severity(data["severity"])
        sound = isinstance(code, str) and isinstance(module, str) and (call is None or type(call) is int)
        if sound and all(type(head) is int for head in heads) and (over is None or type(over) in (int, float)):
            return Known(code, module, call, heads, severity, over)
    except (KeyError, TypeError, ValueError):
        pass
    raise LoadError(f"baseline {path}: finding {number} cannot be read; expected what --write-baseline wrote")
