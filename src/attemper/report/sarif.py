"""A report as SARIF 2.1.0, for code scanning.

A finding has a logical location, the module; it has a physical one (GitHub asks for it) where the model is a folder, its
config.json. Module names and messages come from a checkpoint: control characters are written out, and what SARIF reads as a
placeholder or a link in a message is escaped.
"""

import hashlib
import json
from typing import Any
from urllib.parse import quote

from attemper.report import layout
from attemper.report.names import safe
from attemper.report.records import Finding, Outcome, Severity
from attemper.report.rule import Rule, Rules
from attemper.stats.numbers import to_json

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}


def to_sarif(
    report: Outcome,
    rules: Rules,
    *,
    version: str,
    artifact: str | None = None,
    docs_url: str | None = None,
    compared: bool = False,
) -> dict[str, Any]:
    """The report as a SARIF log of one run.

    Args:
        rules: all rules; version: attemper's.
        artifact: relative path of the file that stands for the model, with slashes; None where there is none.
        docs_url: where the documents are, for links to the page of each rule.
        compared: whether a baseline was given, so that a finding that it lacks is new.
    """
    numbers = {rule.code: number for number, rule in enumerate(rules)}
    results = [_result(f, numbers, artifact, "new" if compared else None) for f in report.findings]
    results += [_result(f, numbers, artifact, "unchanged") for f in report.suppressed]
    driver: dict[str, Any] = {"name": "attemper", "version": version, "rules": [_rule(rule, docs_url) for rule in rules]}
    if docs_url:
        driver["informationUri"] = docs_url
    told = [("note", note) for note in report.notes]
    for what, missed in (("was not looked at", layout.not_seen(report)), ("has no bound", layout.unbounded(report))):
        told += [("warning", f"{module or 'the model itself'} {what}: {reason}") for module, reason in missed]
    if not report.looked_at:
        told.append(("error", "no attention call was seen"))
    invocation = {
        "executionSuccessful": True,
        "toolExecutionNotifications": [{"level": level, "message": {"text": message_text(words)}} for level, words in told],
    }
    run = {
        "tool": {"driver": driver},
        "invocations": [invocation],
        "results": results,
        "properties": {"model": safe(report.model), "inputs": safe(report.inputs), "dtype": report.dtype},
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def sarif_text(log: dict[str, Any]) -> str:
    """The log as JSON in ASCII."""
    return json.dumps(log, indent=1, allow_nan=False) + "\n"


def message_text(words: str) -> str:
    """Plain text as SARIF's message has it: braces doubled, and no bracket that begins a link."""
    text = safe(words).replace("{", "{{").replace("}", "}}")
    return text.replace("[", "\\[").replace("]", "\\]") if "](" in text else text


def _rule(rule: Rule, docs_url: str | None) -> dict[str, Any]:
    parts = [("Why", rule.why), ("What to do", rule.remedy), ("When to ignore", rule.ignore_when), ("Source", rule.source)]
    parts = [(title, text) for title, text in parts if text]
    described: dict[str, Any] = {
        "id": rule.code,
        "name": "".join(word.capitalize() for word in rule.name.split("-")),
        "shortDescription": {"text": message_text(rule.summary)},
        "fullDescription": {"text": message_text(rule.why)},
        "help": {
            "text": "\n\n".join(f"{title}: {text}" for title, text in parts),
            "markdown": "\n\n".join(f"**{title}.** {text}" for title, text in parts),
        },
        "defaultConfiguration": {"level": _LEVELS[Severity(rule.severity)]},
    }
    if docs_url:
        described["helpUri"] = f"{docs_url.rstrip('/')}/rules/{rule.code}.html"
    return described


def _result(finding: Finding, numbers: dict[str, int], artifact: str | None, state: str | None) -> dict[str, Any]:
    module = safe(finding.module)
    location: dict[str, Any] = {}
    if module:
        location["logicalLocations"] = [
            {"name": module.rpartition(".")[2] or module, "fullyQualifiedName": module, "kind": "module"}
        ]
    if artifact:
        location["physicalLocation"] = {"artifactLocation": {"uri": quote(artifact)}, "region": {"startLine": 1}}
    place = f"{module} call {finding.call}" if finding.call else module or "the model"
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "level": _LEVELS[finding.severity],
        "message": {"text": message_text(f"{place}: {finding.message}")},
        "locations": [location] if location else [],
        "partialFingerprints": {"attemper/v1": fingerprint(finding)},
        "properties": {
            "call": finding.call,
            "heads": list(finding.heads),
            "measured": to_json(finding.measured),
            "threshold": to_json(finding.threshold),
            "cost": safe(finding.cost),
            "remedy": safe(finding.remedy),
            "source": safe(finding.source),
        },
    }
    if finding.code in numbers:
        result["ruleIndex"] = numbers[finding.code]
    if state:
        result["baselineState"] = state
    if state == "unchanged":
        result["suppressions"] = [{"kind": "external", "status": "accepted", "justification": "It is in the baseline."}]
    return result


def fingerprint(finding: Finding) -> str:
    """What a finding is recognised by in another run: its code and place, not what was measured."""
    parts = [finding.code, finding.module, finding.call, list(finding.heads)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
