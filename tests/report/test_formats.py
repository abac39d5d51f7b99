"""The forms of a report for programs: JSON against its schema, GitHub's commands, JUnit's XML."""

import importlib.resources
import json
import re
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree as ET

import jsonschema
import pytest

import attemper
from attemper.checker import RULES
from attemper.report import Report, Severity
from attemper.report.github import github_lines
from attemper.report.junit import junit_text
from tests import checkpoints
from tests.reports import HOSTILE, by_weights, finding, hostile_report, report

NAMES = {rule.code: rule.name for rule in RULES}


def schema() -> dict[str, Any]:
    return json.loads((importlib.resources.files("attemper.report") / "report.schema.json").read_text("utf-8"))


class TestJson:
    @pytest.fixture
    def validator(self) -> jsonschema.Draft202012Validator:
        jsonschema.Draft202012Validator.check_schema(schema())
        return jsonschema.Draft202012Validator(schema())

    def test_reports_fit_the_schema(self, validator: jsonschema.Draft202012Validator) -> None:
        for whole in (report(), report(layers=0), hostile_report(), attemper.check(checkpoints.llama()), attemper.check()):
            text = json.dumps(whole.to_dict(), allow_nan=False)
            validator.validate(json.loads(text))

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"schema": 1}, "2 was expected"),
            ({"extra": 1}, "'extra' was unexpected"),
            ({"dtype": None}, "None is not of type 'string'"),
            ({"counts": {"error": -1, "warning": 0, "info": 0}}, "-1 is less than the minimum"),
        ],
    )
    def test_what_does_not(self, validator: jsonschema.Draft202012Validator, change: dict[str, Any], words: str) -> None:
        with pytest.raises(jsonschema.ValidationError, match=words):
            validator.validate(report(finding()).to_dict() | change)

    def test_everything_in_it_is_required_and_nothing_else_allowed(self) -> None:
        def objects(node: Any) -> list[dict[str, Any]]:
            here = [node] if isinstance(node, dict) and "properties" in node else []
            inside = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
            return [*here, *(each for part in inside for each in objects(part))]

        found = objects(schema())
        assert len(found) >= 6
        for each in found:
            assert each["additionalProperties"] is False
            assert sorted(each["required"]) == sorted(each["properties"])

    def test_old_findings_come_back(self) -> None:
        whole = hostile_report()
        again = Report.from_dict(json.loads(json.dumps(whole.to_dict())))
        assert again.suppressed == whole.suppressed != ()


COMMAND = re.compile(r"::(error|warning|notice) (?:file=([^,:]*),)?title=([^,:]*)::(.*)")


def commands(text: str) -> list[tuple[str, str, str, str]]:
    """(command, file, title, message) as GitHub's runner reads them."""
    matches = [COMMAND.fullmatch(line) for line in text.splitlines()]
    return [(m[1], unquote(m[2] or ""), unquote(m[3]), unquote(m[4])) for m in matches if m]


class TestGithub:
    def test_one_for_each_code_and_severity(self) -> None:
        whole = report(finding(), finding(module="layers.2.attention"), finding("ATT402", Severity.ERROR, measured=None))
        first, second = commands(github_lines(whole, NAMES, artifact="models/a, b/config.json"))
        assert first[:3] == ("error", "models/a, b/config.json", "ATT402 sees-the-future")
        assert second[:3] == ("warning", "models/a, b/config.json", "ATT301 saturated-head")
        assert second[3] == "layers.[1-2].attention: heads 1 and 2: something was measured.\nremedy: a remedy"

    def test_info_is_a_notice_and_no_file_is_made_up(self) -> None:
        ((command, file, title, _),) = commands(github_lines(report(finding("ATT302", Severity.INFO)), NAMES))
        assert (command, file, title) == ("notice", "", "ATT302 sink-head")

    def test_hostile_names_stay_in_their_message(self) -> None:
        text = github_lines(hostile_report(), NAMES, artifact=HOSTILE)
        *lines, closing = text.split("\n")[:-1]
        assert all(COMMAND.fullmatch(line) for line in lines)
        assert not closing.startswith(("::", "##["))
        assert "gotcha" in text
        assert not set(text) & set("\r\x1b\x00\u202e\x85\u2028")
        assert any("100%,:25%0A" in message for _, _, _, message in commands(text))

    def test_nothing_to_check(self) -> None:
        assert commands(github_lines(report(layers=0), NAMES))[0][0] == "error"
        assert not commands(github_lines(by_weights(), NAMES))

    def test_a_module_without_a_bound_was_seen(self) -> None:
        whole = by_weights(unseen=(("layers.1.attention", "a reason"), ("layers.2.attention", "a reason")))
        titles = [" ".join(map(str, command)) for command in commands(github_lines(whole, NAMES))]
        assert len(titles) == 2
        assert "not seen" in titles[0]
        assert "layers.2.attention: a reason" in titles[0]
        assert "no bound" in titles[1]
        assert "layers.1.attention: a reason" in titles[1]


class TestJunit:
    def suite(self, whole: Report, fail_on: str = "error") -> ET.Element:
        root = ET.fromstring(junit_text(whole, RULES, fail_on))
        assert root.tag == "testsuites"
        (suite,) = root
        for element in (root, suite):
            cases = suite.findall("testcase")
            assert int(element.attrib["tests"]) == len(cases) == len(RULES) + 1
            assert int(element.attrib["failures"]) == sum(case.find("failure") is not None for case in cases)
            assert int(element.attrib["errors"]) == sum(case.find("error") is not None for case in cases)
            assert element.attrib["skipped"] == "0"
        assert {child.tag for child in suite} == {"properties", "testcase", "system-out"}
        return suite

    def case(self, suite: ET.Element, code: str) -> ET.Element:
        (found,) = (case for case in suite.findall("testcase") if case.attrib["name"].startswith(code))
        return found

    def test_a_rule_fails_from_fail_on(self) -> None:
        whole = report(finding(), finding("ATT402", Severity.ERROR, measured=None), finding(module="layers.2.attention"))
        suite = self.suite(whole)
        assert self.case(suite, "ATT402").find("failure") is not None
        assert self.case(suite, "ATT301").find("failure") is None
        assert "something was measured" in (self.case(suite, "ATT301").findtext("system-out") or "")
        failure = self.case(self.suite(whole, "warning"), "ATT301").find("failure")
        assert failure is not None
        assert failure.attrib["message"].startswith("2 places, first warning: layers.1.attention: ")
        assert (failure.text or "").splitlines()[-2:] == ["remedy: a remedy", "source: a source"]
        assert not self.suite(whole, "never").findall("testcase/failure")

    def test_old_findings_do_not_fail(self) -> None:
        case = self.case(self.suite(report(suppressed=(finding(severity=Severity.ERROR),))), "ATT301")
        assert case.find("failure") is None
        assert (case.findtext("system-out") or "").startswith("in the baseline: error: layers.1.attention")

    def test_nothing_to_check_is_an_error(self) -> None:
        assert self.suite(report(layers=0)).attrib["errors"] == "1"
        assert self.suite(report()).attrib["errors"] == "0"
        assert self.suite(by_weights()).attrib["errors"] == "0"

    def test_hostile_names_are_text(self) -> None:
        suite = self.suite(hostile_report(), "info")
        text = "".join(suite.itertext())
        assert "]]><script>&amp;\"'<!--" in text
        assert not {c for c in text if c < " " and c != "\n"}
        assert "\\x00\\x08\\ufffe\\uffff\\ud800" in text
        assert "\U0001ffff" in text
