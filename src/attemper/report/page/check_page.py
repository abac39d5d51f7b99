"""The page of a check: verdict, findings, a map of every head, each head's distribution, layers, what was not seen, notes."""

import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from attemper.report import layout
from attemper.report.names import safe
from attemper.report.page.charts import vega_script
from attemper.report.page.heads import layer_data, map_data
from attemper.report.page.requirements import require_page
from attemper.report.page.shell import render_page, script
from attemper.report.records import Finding, LayerRow, Outcome, Severity

_SHOWN = 6  # findings of one code before the rest is folded
_LINKED = 12  # heads of one finding that get a link
_PACKAGES = ("attemper", "torch", "transformers", "timm", "diffusers")


class RuleWords(Protocol):
    """What a page says about a code, as the rules of `attemper.checker` have it."""

    @property
    def name(self) -> str:
        """A few words in kebab case."""

    @property
    def summary(self) -> str:
        """One sentence: what is found."""

    @property
    def why(self) -> str:
        """What it costs and how it is decided."""


@dataclass(frozen=True)
class Place:
    """Where one finding is. row: number of its layer in the page's map, None for the whole model."""

    name: str
    row: int | None
    heads: tuple[int, ...]
    more: int
    measured: str
    threshold: str
    message: str


@dataclass(frozen=True)
class Group:
    """The findings of one code and severity, worst first; places: the first few, folded: the rest."""

    code: str
    severity: str
    name: str
    summary: str
    why: str
    cost: str
    remedy: str
    source: str
    places: tuple[Place, ...]
    folded: tuple[Place, ...]


def check_page(report: Outcome, rules: Mapping[str, RuleWords] | None = None, when: datetime | None = None) -> str:
    """The report as one HTML file, as text.

    Args:
        report: what was found.
        rules: names and explanations by code, to stand beside the findings.
        when: the date to print; None: now.

    Raises:
        MissingExtraError: a package of the extra `html` is absent.
    """
    require_page()
    shared, table = layout.table(report)
    labels = [cells[0] for cells in table]
    rows = _numbers(report.rows)
    titles = [layout.place(row.module, row.call if row.module in _repeated(report.rows) else None) for row in report.rows]
    groups = layout.grouped(report)
    data: dict[str, Any] = {"data": map_data(report.rows, labels, titles) | _for_script(groups, rules or {}, rows)}
    data |= {f"layer-data-{number}": layer_data(row) for number, row in enumerate(report.rows)}
    return render_page(
        "check.html.j2",
        styles=("check.css",),
        scripts=[vega_script(), script("numbers.js", "map.js", "head.js", "check.js")] if report.rows else [],
        data=data if report.rows else {},
        title=f"attemper check: {safe(report.model)}",
        tone=_tone(report),
        verdict=_verdict(report),
        lead=_lead(report, groups, rules or {}),
        facts=[*layout.heading(report), *_origin(when or datetime.now(UTC))],
        tiles=_tiles(report),
        counts=[(str(severity), report.count(severity)) for severity in Severity],
        groups=[_group(findings, rules or {}, rows) for findings in groups],
        rows=len(report.rows),
        shared=shared,
        columns=layout.COLUMNS,
        table=table,
        legend=layout.LEGEND,
        unseen=layout.unseen(report),
        notes=layout.notes(report),
    )


def _numbers(rows: Sequence[LayerRow]) -> dict[tuple[str, int | None], int]:
    """The number of a row by module and call, and of a module's first row by the module alone."""
    found: dict[tuple[str, int | None], int] = {}
    for number, row in enumerate(rows):
        found[row.module, row.call] = number
        found.setdefault((row.module, None), number)
    return found


def _repeated(rows: Sequence[LayerRow]) -> set[str]:
    return {row.module for row in rows if row.call}


def _tone(report: Outcome) -> str:
    worst = next((severity for severity in Severity if report.count(severity)), None)
    return str(worst) if worst else "clean" if report.rows else "nothing"


def _verdict(report: Outcome) -> str:
    if not report.rows and not report.findings:
        return "Nothing to check: no attention call was seen."
    errors, warnings, described = (report.count(severity) for severity in Severity)
    where = f"in {layout.plural(len(report.rows), 'attention call')}"
    if errors and warnings:
        return f"{layout.plural(errors, 'error')} and {layout.plural(warnings, 'warning')} {where}."
    if errors:
        return f"{layout.plural(errors, 'error')} {where}."
    if warnings:
        return f"No error, {layout.plural(warnings, 'warning')} {where}."
    return f"No error and no warning {where}." if described else f"Nothing found {where}."


def _lead(report: Outcome, groups: Sequence[Sequence[Finding]], rules: Mapping[str, RuleWords]) -> str:
    """What the gravest findings are about, and whether anything was left out."""
    gravest = [found for found in groups if found[0].severity is groups[0][0].severity] if groups else []
    if gravest and gravest[0][0].severity is Severity.INFO:
        gravest = []
    sentences = [rules[code].summary for code in dict.fromkeys(found[0].code for found in gravest[:3]) if code in rules]
    if report.unseen:
        modules = len(report.unseen)
        sentences.append(f"{layout.plural(modules, 'module')} {'was' if modules == 1 else 'were'} not seen.")
    return " ".join(sentences)


def _origin(when: datetime) -> list[tuple[str, str]]:
    versions = [
        f"{name} {version}" for name in _PACKAGES if (version := getattr(sys.modules.get(name), "__version__", None)) is not None
    ]
    return [("versions", ", ".join([*versions, f"Python {platform.python_version()}"])), ("written", f"{when:%Y-%m-%d %H:%M %Z}")]


def _tiles(report: Outcome) -> list[tuple[str, str]]:
    totals = report.totals
    if not report.rows:
        return []
    return [
        ("attention calls", f"{totals.calls:,}"),
        ("heads", f"{totals.heads:,}"),
        ("rows", f"{totals.rows:,}"),
        ("largest logit", layout.number(totals.max_logit)),
        ("fp16 room", f"{layout.number(totals.headroom_float16)}×"),
        ("mean norm. entropy", layout.form(totals.mean_normalized_entropy, ".3f")),
        ("mean gain", layout.form(totals.mean_gain, ".3f")),
        ("saturated rows", layout.form(totals.saturated_share, ".1%")),
    ]


def _group(findings: Sequence[Finding], rules: Mapping[str, RuleWords], rows: Mapping[tuple[str, int | None], int]) -> Group:
    first = findings[0]
    rule = rules.get(first.code)
    places = tuple(_place(finding, rows) for finding in findings)
    return Group(
        code=safe(first.code),
        severity=str(first.severity),
        name=rule.name if rule else "",
        summary=rule.summary if rule else "",
        why=rule.why if rule else "",
        cost=safe(first.cost),
        remedy=safe(first.remedy),
        source=safe(first.source),
        places=places[:_SHOWN],
        folded=places[_SHOWN:],
    )


def _place(finding: Finding, rows: Mapping[tuple[str, int | None], int]) -> Place:
    return Place(
        name=layout.place(finding.module, finding.call or None),
        row=rows.get((finding.module, finding.call)),
        heads=finding.heads[:_LINKED],
        more=max(0, len(finding.heads) - _LINKED),
        measured="" if finding.measured is None else layout.number(finding.measured),
        threshold="" if finding.threshold is None else layout.number(finding.threshold),
        message=safe(finding.message),
    )


def _for_script(
    groups: Sequence[Sequence[Finding]], rules: Mapping[str, RuleWords], rows: Mapping[tuple[str, int | None], int]
) -> dict[str, Any]:
    """The findings once more, for the map's marks and the panel of a head; what a group shares is written once."""
    return {
        "groups": [
            {
                "code": safe(found[0].code),
                "severity": str(found[0].severity),
                "name": rules[found[0].code].name if found[0].code in rules else "",
                "remedy": safe(found[0].remedy),
                "source": safe(found[0].source),
            }
            for found in groups
        ],
        "findings": [
            {"group": number, "layer": row, "heads": finding.heads, "message": safe(finding.message)}
            for number, found in enumerate(groups)
            for finding in found
            if (row := rows.get((finding.module, finding.call))) is not None
        ],
    }
