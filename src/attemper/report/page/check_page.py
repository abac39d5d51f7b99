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
from attemper.report.records import Finding, Outcome, Severity

_SHOWN = 6  # findings of one code before the rest is folded
_LINKED = 16  # heads of one finding that get a link
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
class Link:
    """A number that leads to a head or a layer of the map; target: "" where the map does not have it."""

    text: str
    target: str
    spoken: str


@dataclass(frozen=True)
class Place:
    """One finding, or several that say the same; links: to its heads, or to the layers of several; more: heads without a link."""

    name: str
    target: str
    links_to: str
    links: tuple[Link, ...]
    more: int
    measured: str
    threshold: str
    message: str


@dataclass(frozen=True)
class Group:
    """The findings of one code and severity, worst first; count: how many; places: the first few, folded: the rest."""

    code: str
    severity: str
    name: str
    summary: str
    why: str
    cost: str
    remedy: str
    source: str
    count: int
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
    layers = _Layers(report)
    groups = layout.grouped(report)
    data: dict[str, Any] = {}
    scripts = []
    if report.rows:
        scripts = [vega_script(), script("numbers.js", "chart.js", "map.js", "controls.js", "head.js", "check.js")]
        data["data"] = map_data(report.rows, layers.labels, layers.titles) | _for_script(groups, rules or {}, layers)
        data |= {f"layer-data-{number}": layer_data(row) for number, row in enumerate(report.rows)}
    return render_page(
        "check.html.j2",
        styles=("check.css",),
        scripts=scripts,
        data=data,
        title=f"attemper check: {safe(report.model)}",
        tone=_tone(report),
        verdict=_verdict(report),
        lead=_lead(report, groups, rules or {}),
        facts=[*layout.heading(report), *_origin(when or datetime.now(UTC))],
        tiles=_tiles(report),
        counts=[(str(severity), report.count(severity)) for severity in Severity],
        groups=[_group(findings, rules or {}, layers) for findings in groups],
        rows=len(report.rows),
        shared=layers.shared,
        columns=layout.COLUMNS,
        table=layers.table,
        legend=layout.LEGEND,
        weights=_weights(report),
        missed=layout.missed(report),
        notes=layout.notes(report),
    )


def _tone(report: Outcome) -> str:
    worst = next((severity for severity in Severity if report.count(severity)), None)
    return str(worst) if worst else "clean" if report.looked_at else "nothing"


def _verdict(report: Outcome) -> str:
    if not report.looked_at and not report.findings:
        return "Nothing to check: no attention call was seen."
    errors, warnings, described = (report.count(severity) for severity in Severity)
    where = f"in {layout.plural(len(report.rows), 'attention call')}"
    if report.weights:
        where = f"in {layout.plural(len(report.weights), 'attention module')}, by weights alone"
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
    if modules := len(layout.not_seen(report)):
        sentences.append(f"{layout.plural(modules, 'module')} {'was' if modules == 1 else 'were'} not seen.")
    if modules := len(layout.unbounded(report)):
        sentences.append(f"{layout.plural(modules, 'module')} {'has' if modules == 1 else 'have'} no bound.")
    return " ".join(sentences)


def _origin(when: datetime) -> list[tuple[str, str]]:
    versions = [
        f"{name} {version}" for name in _PACKAGES if (version := getattr(sys.modules.get(name), "__version__", None)) is not None
    ]
    return [("versions", ", ".join([*versions, f"Python {platform.python_version()}"])), ("written", f"{when:%Y-%m-%d %H:%M %Z}")]


def _weights(report: Outcome) -> dict[str, Any] | None:
    """The table of the weights, where they alone were looked at."""
    if not report.weights:
        return None
    shared, table = layout.weights_table(report)
    return {"shared": shared, "columns": layout.WEIGHT_COLUMNS, "table": table, "legend": layout.WEIGHT_LEGEND}


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


def _group(findings: Sequence[Finding], rules: Mapping[str, RuleWords], layers: "_Layers") -> Group:
    first = findings[0]
    rule = rules.get(first.code)
    alike: dict[tuple[Any, ...], list[Finding]] = {}
    for finding in findings:
        alike.setdefault((finding.message, finding.measured, finding.threshold), []).append(finding)
    places = tuple(_place(each, layers) for each in alike.values())
    return Group(
        code=safe(first.code),
        severity=str(first.severity),
        name=rule.name if rule else "",
        summary=rule.summary if rule else "",
        why=rule.why if rule else "",
        cost=safe(first.cost),
        remedy=safe(first.remedy),
        source=safe(first.source),
        count=len(findings),
        places=places[:_SHOWN],
        folded=places[_SHOWN:],
    )


def _place(alike: Sequence[Finding], layers: "_Layers") -> Place:
    first = alike[0]
    row = layers.number(first)
    names = [layout.place(finding.module, finding.call or None) for finding in alike]
    if len(alike) > 1:
        numbers = sorted({number for finding in alike if (number := layers.number(finding)) is not None})
        links = [Link(layers.labels[number], f"#layer-{number}", layers.titles[number]) for number in numbers]
    else:
        links = [
            Link(str(head), "" if row is None else f"#head-{row}-{head}", f"{names[0]}, head {head}") for head in first.heads
        ]
    return Place(
        name=layout.together(names),
        target="" if len(alike) > 1 or row is None else f"#layer-{row}",
        links_to="layer" if len(alike) > 1 else "head",
        links=tuple(links[:_LINKED]),
        more=max(0, len(links) - _LINKED),
        measured="" if first.measured is None else layout.number(first.measured),
        threshold="" if first.threshold is None else layout.number(first.threshold),
        message=safe(first.message),
    )


def _for_script(groups: Sequence[Sequence[Finding]], rules: Mapping[str, RuleWords], layers: "_Layers") -> dict[str, Any]:
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
            if (row := layers.number(finding)) is not None
        ],
    }


class _Layers:
    """The rows of the map: their names, and which one a finding is about."""

    def __init__(self, report: Outcome) -> None:
        repeated = {row.module for row in report.rows if row.call}
        self.shared, self.table = layout.table(report)
        self.labels = [cells[0] for cells in self.table]
        self.titles = [layout.place(row.module, row.call if row.module in repeated else None) for row in report.rows]
        self._numbers: dict[tuple[str, int | None], int] = {}
        for number, row in enumerate(report.rows):
            self._numbers[row.module, row.call] = number
            self._numbers.setdefault((row.module, None), number)

    def number(self, finding: Finding) -> int | None:
        """The row of a finding's call, or of its module's first one; None if the finding is about no attention call."""
        return self._numbers.get((finding.module, finding.call))
