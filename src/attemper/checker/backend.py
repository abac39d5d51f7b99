"""ATT105: a backend that does not do what its call says, found by the call's output where the logits themselves are hidden.

A few rows of each call are computed in float64 by the rule that the call states, and the output is held against them within a
worst-case bound on rounding. What must hold: `measure_output` keeps no q, k or v; a rule that was found for another one is told,
so that the scale rules judge the scale that is really applied.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from attemper.capture.record import AttentionCall
from attemper.checker.applying.applied import applied
from attemper.checker.codes import RULES
from attemper.checker.evidence import CallEvidence, Evidence
from attemper.report import Finding, Severity

ROWS = 32  # an argument that is ignored moves every row
_RULE = next(rule for rule in RULES if rule.code == "ATT105")


@dataclass(frozen=True)
class Shown:
    """What the output of a call shows.

    Attributes:
        cause: which argument was ignored, "" where none was, "unknown" where nothing that was tried gives the output; words: the
            same in words.
        excess: by how many times the output misses its bound under the rule that was stated.
        scale: the scale that the output shows, where it is not the stated one.
    """

    cause: str = ""
    words: str = ""
    excess: float = 0.0
    scale: float | Tensor | None = None


def measure_output(call: AttentionCall, real: Tensor) -> Shown:
    """Judge a call by some of its rows; where their output is known, this waits for the device once.

    Args:
        real: bool [batch, queries], which queries are real tokens.
    """
    if call.dropout_p > 0:
        return Shown()  # its output is drawn
    start = max(0, (call.query.shape[-2] - ROWS) // 2)  # in the middle a causal row has keys to see and keys to miss
    sample = slice(start, start + ROWS)
    whole = _as_passed(call)
    if whole is not call:
        taken = applied(whole, real, sample)
        if taken.cause in ("", "softcap", "sinks"):
            return Shown(taken.cause, taken.words, taken.excess)
    found = applied(call, real, sample)
    scale = found.call.scale if found.cause == "scale" else None
    return Shown(found.cause, found.words, found.excess, scale.cpu() if isinstance(scale, Tensor) else scale)


def _as_passed(call: AttentionCall) -> AttentionCall:
    """With what the model passes and the function does not name; the call itself where there is nothing of the kind."""
    if call.softcap_given is None and call.sinks_given is None:
        return call
    return replace(
        call,
        softcap=call.softcap if call.softcap_given is None else call.softcap_given,
        sinks=call.sinks if call.sinks_given is None else call.sinks_given,
    )


def backend_findings(evidence: Evidence) -> Iterator[Finding]:
    """The findings ATT105, one for each module and cause."""
    told = set()
    for call in evidence.calls:
        shown = call.shown
        if isinstance(shown, Shown) and shown.cause not in ("", "nonfinite") and (call.module, shown.words) not in told:
            told.add((call.module, shown.words))
            yield _finding(call, shown)


def _finding(call: CallEvidence, shown: Shown) -> Finding:
    known = shown.cause != "unknown"
    words = shown.words if known else f"it gives {shown.words}"
    more = "" if known else " Nothing that was tried (scale, softcap, sinks, mask, order of heads) gives it either."
    return Finding(
        code=_RULE.code,
        severity=Severity.ERROR if known else Severity.WARNING,
        module=call.module,
        call=call.call,
        heads=(),
        measured=shown.excess,
        threshold=1.0,
        message=f"the backend does not do what the call says: {words}{_scales(call, shown)}.{more}",
        source=_RULE.source,
        cost="Everything behind it differs from the same weights run by another backend, and from their training.",
        remedy=_RULE.remedy,
    )


def _scales(call: CallEvidence, shown: Shown) -> str:
    if shown.scale is None or isinstance(call.scale, Tensor):
        return ""
    if isinstance(shown.scale, Tensor) and shown.scale.numel() > 1:
        return f" of {call.scale:.5g}: its output shows {float(shown.scale.min()):.5g} to {float(shown.scale.max()):.5g}"
    return f" of {call.scale:.5g}: its output shows {float(shown.scale):.5g}"
