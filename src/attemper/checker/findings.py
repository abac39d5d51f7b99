"""Makes a finding from a rule and what was measured."""

from collections.abc import Iterable, Sequence

from attemper.checker.codes import BY_CODE
from attemper.report import Finding, Severity


def finding(
    code: str,
    message: str,
    *,
    cost: str,
    module: str = "",
    call: int | None = None,
    heads: Sequence[int] = (),
    measured: float | None = None,
    threshold: float | None = None,
    severity: Severity | None = None,
    remedy: str | None = None,
) -> Finding:
    """A finding with the rule's source, and its severity and remedy unless others are given."""
    rule = BY_CODE[code]
    return Finding(
        code=code,
        severity=severity or rule.severity,
        module=module,
        call=call,
        heads=tuple(heads),
        measured=measured,
        threshold=threshold,
        message=message,
        source=rule.source,
        cost=cost,
        remedy=remedy or rule.remedy,
    )


def heads_in_words(heads: Iterable[int], most: int = 8) -> str:
    """'head 3', 'heads 1, 4 and 7', or 'heads 0, 1, 2 and 9 more'."""
    listed = [str(head) for head in heads]
    if len(listed) == 1:
        return f"head {listed[0]}"
    shown = listed if len(listed) <= most else [*listed[: most - 1], f"{len(listed) - most + 1} more"]
    return f"heads {', '.join(shown[:-1])} and {shown[-1]}"
