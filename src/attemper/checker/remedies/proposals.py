"""Which remedy fits which finding: one table."""

import math
from collections.abc import Iterable

from attemper.checker.remedies.records import Proposal
from attemper.report import Finding, Report

CLIP = 100.0  # Kimi K2's threshold, arXiv 2507.20534
_CLIPPED = ("ATT201", "ATT202")
_FOLDED = ("ATT101", "ATT102", "ATT103", "ATT104")


def proposals(report: Report) -> tuple[Proposal, ...]:
    """The remedies that fit the findings of a check; most findings need a change of code, and have none."""
    return (*_clips(report), *_folds([finding for finding in report.findings if finding.code in _FOLDED]))


def _clips(report: Report) -> Iterable[Proposal]:
    found = [finding for finding in report.findings if finding.code in _CLIPPED]
    if not found:
        return
    codes = tuple(sorted({finding.code for finding in found}))
    words = f"multiply q's and k's projections of the heads whose largest scale · q·k exceeds {CLIP:g}, so that none does"
    yield Proposal(codes, len(found), f"--clip --threshold {CLIP:g}", words)


def _folds(found: list[Finding]) -> Iterable[Proposal]:
    pairs: dict[tuple[float, float], list[Finding]] = {}
    for finding in found:
        if finding.measured and finding.threshold and math.isfinite(finding.measured):
            pairs.setdefault((finding.threshold, finding.measured), []).append(finding)
    if len(pairs) != 1:  # one rule for all layers is what can be asked for
        return
    ((expected, applied), findings) = next(iter(pairs.items()))
    codes = tuple(sorted({finding.code for finding in findings}))
    words = (
        f"multiply q's projections by {expected / applied:.6g}, so that code which applies {applied:.6g} computes what "
        f"{expected:.6g} would; where the code or a setting is at fault, repair that instead"
    )
    yield Proposal(codes, len(findings), f"--fold {expected:.8g}:{applied:.8g}", words)
