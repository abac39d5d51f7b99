"""`Rule`: what there is to say about one code, wherever it is said."""

from collections.abc import Sequence
from dataclasses import dataclass

from attemper.report.records import Severity


@dataclass(frozen=True)
class Rule:
    """One thing that check looks for.

    Attributes:
        code: stable code; name: a few words in kebab case; severity: the usual one (a finding may carry a lower or higher one).
        summary: one sentence: what is found; why: what it costs and how it is decided; remedy: what to do.
        source: where the threshold or the rule comes from.
        measured: what the number of a finding is, and what it is held against.
        ignore_when: when a finding may be ignored.
        example: a model with the fault, as `attemper check` takes it; options: what else must be given for it to be found.
    """

    code: str
    name: str
    severity: Severity
    summary: str
    why: str
    remedy: str
    source: str
    measured: str = ""
    ignore_when: str = ""
    example: str = ""
    options: str = ""


Rules = Sequence[Rule]
