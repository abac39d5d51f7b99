"""A report as JUnit XML: one test case for each rule, so that a test's history in CI is that of one rule.

A rule fails if a finding of it is as grave as --fail-on says; other findings, and old ones, stand in the case's output. That
attention was seen at all is a case of its own.
"""

import re
from xml.etree import ElementTree as ET

from attemper.report import layout
from attemper.report.names import safe
from attemper.report.records import Finding, Outcome, at_least
from attemper.report.rule import Rules

# What XML 1.0 cannot say, however it is escaped; control characters are written out before.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_text(report: Outcome, rules: Rules, fail_on: str) -> str:
    """The report as an XML document.

    Args:
        rules: all rules; fail_on: "error", "warning", "info" or "never".
    """
    cases = [_case(report, rule.code, rule.name, fail_on) for rule in rules]
    seen = ET.Element("testcase", {"classname": "attemper", "name": "attention was seen"})
    if not report.looked_at:
        ET.SubElement(seen, "error", {"message": layout.closing(report), "type": "nothing to check"})
    elif missed := layout.missed(report):
        ET.SubElement(seen, "system-out").text = _xml("\n".join("\n".join([title, *lines]) for title, lines in missed))
    counts = {
        "tests": str(len(cases) + 1),
        "failures": str(sum(case.find("failure") is not None for case in cases)),
        "errors": str(int(not report.looked_at)),
        "skipped": "0",
    }
    root = ET.Element("testsuites", {"name": "attemper check", **counts})
    suite = ET.SubElement(root, "testsuite", {"name": _xml(safe(report.model)), **counts})
    properties = ET.SubElement(suite, "properties")
    for name, value in layout.heading(report):
        ET.SubElement(properties, "property", {"name": name, "value": _xml(value)})
    suite.extend([seen, *cases])
    ET.SubElement(suite, "system-out").text = _xml("\n".join([*layout.notes(report), layout.closing(report)]))
    ET.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _case(report: Outcome, code: str, name: str, fail_on: str) -> ET.Element:
    case = ET.Element("testcase", {"classname": "attemper", "name": f"{code} {name}"})
    found = [finding for finding in report.findings if finding.code == code]
    failing = [finding for finding in found if at_least(finding.severity, fail_on)]
    if failing:
        text = "\n".join([*map(_line, failing), f"remedy: {safe(failing[0].remedy)}", f"source: {safe(failing[0].source)}"])
        places = f"{len(failing)} place" if len(failing) == 1 else f"{len(failing)} places"
        message = _xml(f"{places}, first {_line(failing[0])}")
        ET.SubElement(case, "failure", {"message": message, "type": str(failing[0].severity)}).text = _xml(text)
    others = [_line(finding) for finding in found if finding not in failing]
    others += [f"in the baseline: {_line(finding)}" for finding in report.suppressed if finding.code == code]
    if others:
        ET.SubElement(case, "system-out").text = _xml("\n".join(others))
    return case


def _line(finding: Finding) -> str:
    return f"{finding.severity}: {layout.place(finding.module, finding.call or None)}: {safe(finding.message)}"


def _xml(text: str) -> str:
    return _FORBIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
