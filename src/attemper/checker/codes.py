"""The stable codes: the rule of each, and which of them are wanted.

Some are of check (`RULES`), the others are alarms of a training run (`TRAINING`): both are explained, the first can be selected.

A code never changes its meaning; a rule that goes away leaves its number unused.
"""

from collections.abc import Iterable

from attemper.checker.rules import RULES, TRAINING
from attemper.errors import ArgumentError
from attemper.report import Rule

BY_CODE: dict[str, Rule] = {rule.code: rule for rule in (*RULES, *TRAINING)}


def rule(code: str) -> Rule:
    """The rule of one code (case does not matter).

    Raises:
        ArgumentError: no rule has this code; the message lists those that exist.
    """
    found = BY_CODE.get(code.strip().upper())
    if found is None:
        raise ArgumentError("code", repr(code), f"one of {', '.join(BY_CODE)}")
    return found


def prefixes(argument: str, given: str | Iterable[str] | None) -> tuple[str, ...]:
    """Codes and prefixes from a list or a comma-separated string, in capitals.

    Raises:
        ArgumentError: one of them fits no rule of check; the message lists the codes.
    """
    if given is None:
        return ()
    parts = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(part, str) for part in parts):
        raise ArgumentError(argument, repr(given), "codes or beginnings of codes, in a list or with commas")
    wanted = tuple(piece.strip().upper() for part in parts for piece in part.split(",") if piece.strip())
    for prefix in wanted:
        if any(rule.code.startswith(prefix) for rule in RULES):
            continue
        codes = ", ".join(rule.code for rule in RULES)
        if any(rule.code.startswith(prefix) for rule in TRAINING):
            alarms = (
                f"a code of check: {codes}. ATT5xx are alarms over a training run: attemper.watch gives them, check never does"
            )
            raise ArgumentError(argument, repr(prefix), alarms)
        raise ArgumentError(argument, repr(prefix), f"a code or the beginning of one: {codes}")
    return wanted


def is_selected(code: str, select: tuple[str, ...], ignore: tuple[str, ...]) -> bool:
    """Whether a finding with this code is wanted: the longest prefix that fits decides, and ignore wins a tie.

    Without `select` every code is wanted.
    """

    def longest(given: tuple[str, ...]) -> int:
        return max((len(prefix) for prefix in given if code.startswith(prefix)), default=-1)

    chosen = longest(select) if select else 0
    return chosen >= 0 and chosen > longest(ignore)
