"""What counts as an old finding, and the file that says so."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from attemper.errors import LoadError
from attemper.report import Finding, Severity
from attemper.report.baseline import compare, excess, known, read, written
from tests.reports import HOSTILE, finding, hostile_report, report


def is_old(now: Finding, *before: Finding) -> bool:
    return compare(report(now), known(before)).suppressed == (now,)


class TestOld:
    @pytest.mark.parametrize(
        ("changes", "old"),
        [
            ({}, True),
            ({"measured": 0.76, "message": "other words"}, True),
            ({"heads": (1,)}, True),
            ({"heads": (2, 1)}, True),
            ({"heads": (1, 2, 3)}, False),
            ({"heads": ()}, False),
            ({"module": "layers.2.attention"}, False),
            ({"call": 1}, False),
            ({"call": None}, False),
            ({"code": "ATT302"}, False),
            ({"severity": Severity.INFO}, True),
            ({"severity": Severity.ERROR}, False),
            ({"measured": 1.5}, True),
            ({"measured": 1.52}, False),
            ({"measured": None}, True),
        ],
    )
    def test_it_has_the_same_place_and_is_not_much_worse(self, changes: dict[str, Any], old: bool) -> None:
        assert is_old(finding(**changes), finding()) is old

    def test_a_whole_layer_covers_its_heads(self) -> None:
        assert is_old(finding(heads=(4,)), finding(heads=()))
        assert is_old(finding(heads=()), finding(heads=()))

    def test_two_findings_of_one_place_cover_the_heads_of_both(self) -> None:
        assert is_old(finding(heads=(1, 3)), finding(heads=(1,)), finding(heads=(3,)))

    def test_a_milder_finding_of_a_head_does_not_cover_a_graver_one(self) -> None:
        mild = finding("ATT202", Severity.INFO, heads=(3,))
        assert not is_old(finding("ATT202", heads=(1, 3)), finding("ATT202", heads=(1,)), mild)

    def test_a_number_where_there_was_none_is_new(self) -> None:
        assert not is_old(finding(), finding(measured=None))

    def test_it_fails_no_more(self) -> None:
        worst = finding(severity=Severity.ERROR)
        compared = compare(report(worst, finding("ATT302", Severity.INFO)), known([worst]))
        assert compared.exit_code() == 0
        assert compared.count("error") == 0
        assert [each.code for each in compared.findings] == ["ATT302"]
        assert "0 errors, 0 warnings, 1 info; 1 old (in the baseline). " in " ".join(str(compared).split())

    def test_what_is_gone_is_told(self) -> None:
        compared = compare(report(finding()), known([finding(), finding(module="a"), finding(module="b")]))
        assert compared.notes == ("2 findings of the baseline are no longer there; write it again",)
        assert compare(report(finding()), known([finding()])).notes == ()
        worse = compare(report(finding(measured=50.0)), known([finding()]))
        assert (worse.notes, worse.suppressed) == ((), ())


@pytest.mark.parametrize(
    ("measured", "threshold", "value"),
    [
        (0.75, 0.5, 1.5),
        (0.125, 0.25, 2.0),
        (-3.0, 1.0, 3.0),
        (7.0, 0.0, 7.0),
        (7.0, None, 7.0),
        (None, 0.5, None),
        (math.nan, 1.0, None),
        (math.inf, 65504.0, math.inf),
        (0.0, 1.0, 0.0),
        (1 / 3, 1.0, 3.0),
    ],
)
def test_excess(measured: float | None, threshold: float | None, value: float | None) -> None:
    assert excess(finding(measured=measured, threshold=threshold)) == value


class TestFile:
    def test_round_trip(self, tmp_path: Path) -> None:
        entries = known(hostile_report().findings)
        file = tmp_path / "baseline.json"
        file.write_text(written(entries), "utf-8")
        assert read(file) == entries
        assert compare(hostile_report(), entries).findings == ()

    def test_one_finding_a_line_sorted(self) -> None:
        findings = [finding(module=f"m.{i}", heads=(2, 1)) for i in (2, 0, 1)] + [finding("ATT101", module=HOSTILE)]
        text = written(known(findings))
        assert written(known(reversed(findings))) == text
        lines = [line for line in text.splitlines() if '"code"' in line]
        assert len(lines) == 4
        assert '"ATT101"' in lines[0]
        assert [f'"m.{i}"' in line for i, line in enumerate(lines[1:])] == [True] * 3
        assert '"heads": [1, 2]' in lines[1]
        assert text.isascii()
        removed = written(known([each for each in findings if each.module != "m.1"]))
        assert set(removed.splitlines()) < set(text.splitlines())  # a diff of one line

    def test_an_empty_one(self, tmp_path: Path) -> None:
        (tmp_path / "empty.json").write_text(written(()))
        assert json.loads(written(())) == {"schema": 1, "findings": []}
        assert read(tmp_path / "empty.json") == ()

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            (None, "absent.json could not be read: No such file"),
            ("", "is not JSON"),
            ("[" * 100_000, "is not JSON"),
            ("[]", "is of another kind"),
            ('{"schema": 2, "findings": []}', "is of another kind"),
            ('{"schema": 1, "findings": [{}]}', "finding 1 cannot be read"),
            ('{"schema": 1, "findings": [[]]}', "finding 1 cannot be read"),
            (written(known([finding()])).replace("[1, 2]", '["1"]'), "finding 1 cannot be read"),
            (written(known([finding()])).replace('"warning"', '"fatal"'), "finding 1 cannot be read"),
            (written(known([finding()])).replace("1.5", '"much"'), "finding 1 cannot be read"),
        ],
    )
    def test_what_cannot_be_read(self, tmp_path: Path, text: str | None, words: str) -> None:
        file = tmp_path / "absent.json"
        if text is not None:
            file.write_text(text)
        with pytest.raises(LoadError, match=words):
            read(file)
