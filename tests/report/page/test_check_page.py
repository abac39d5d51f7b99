"""What the page says, before any script runs."""

import importlib.util
import re
from datetime import UTC, datetime
from html import unescape

import pytest

from attemper.checker import RULES
from attemper.errors import ArgumentError, MissingExtraError
from attemper.report import Report, Severity
from attemper.report.page import check_page
from tests.report.page import pages
from tests.reports import by_weights


def words(report: Report, **options) -> str:
    """The page's text without scripts, styles and tags, in single spaces."""
    text = re.sub(r"<(script|style)\b.*?</\1>", "", check_page(report, **options), flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", text)).split())


@pytest.mark.parametrize(
    ("severities", "verdict"),
    [
        ("", "Nothing found in 5 attention calls."),
        ("i", "No error and no warning in 5 attention calls."),
        ("wi", "No error, 1 warning in 5 attention calls."),
        ("ee", "2 errors in 5 attention calls."),
        ("eww", "1 error and 2 warnings in 5 attention calls."),
    ],
)
def test_the_verdict(severities: str, verdict: str) -> None:
    by_letter = {str(severity)[0]: severity for severity in Severity}
    assert verdict in words(pages.report(*(pages.finding(severity=by_letter[letter]) for letter in severities)))


def test_what_was_checked_on_what_when() -> None:
    text = words(pages.report(), when=datetime(2027, 3, 5, 7, 11, tzinfo=UTC))
    assert "model a model inputs some inputs computed in float32 versions attemper 0.1.0, torch" in text
    assert "written 2027-03-05 07:11 UTC" in text


def test_findings_stand_with_what_was_measured_and_what_to_do() -> None:
    text = words(pages.report(pages.finding("ATT301", heads=(1,))), rules={rule.code: rule for rule in RULES})
    assert "warning ATT301 saturated-head 1 place Most rows of a head" in text
    assert "layers.1.attention head 1 0.75 0.5 heads 1 and 2: something was measured." in text
    assert "cost a cost remedy a remedy" in text
    assert "A row with peak > 0.99 has gain" in text


def test_findings_that_say_the_same_stand_once_and_link_to_each_layer() -> None:
    report = pages.report(*(pages.finding(module=f"layers.{layer}.attention", heads=()) for layer in (0, 1, 3)))
    text = words(report)
    assert "3 places" in text
    assert "layers.[0, 1, 3].attention layer 0 1 3 0.75 0.5 heads 1 and 2: something was measured." in text
    assert text.count("something was measured") == 1
    assert 'href="#layer-3" aria-label="layers.3.attention"' in check_page(report)


def test_many_findings_are_folded_and_none_is_left_out() -> None:
    text = words(pages.report(*(pages.finding(message=f"number {number}.") for number in range(17))))
    assert "11 more" in text
    assert all(f"number {number}." in text for number in range(17))


def test_what_was_not_seen_and_notes() -> None:
    text = words(pages.report(unseen=(("a.b", "it never ran"),), notes=("a note",)))
    assert "1 module was not seen." in text
    assert "Not seen a.b: it never ran Notes a note" in text


def test_a_shared_module_has_a_row_for_each_call() -> None:
    text = words(pages.shared())
    assert "layer = shared.attention" in text
    assert all(f"call {number} 3 " in text for number in range(5))
    assert "shared.attention call 3 head 2" in text


def test_nothing_to_check() -> None:
    page = check_page(pages.report(rows=()))
    assert "Nothing to check: no attention call was seen." in page
    assert "vegaEmbed" not in page
    assert len(page) < 20_000


def test_weights_alone_are_not_nothing() -> None:
    text = words(by_weights())
    assert "Nothing found in 1 attention module, by weights alone." in text
    assert "layers.0.attention 3 23 5 7 — layers.0.norm" in text
    assert "Nothing to check" not in text
    assert 'class="verdict clean"' in check_page(by_weights())


def test_a_module_without_a_bound_was_seen() -> None:
    text = words(by_weights(unseen=(("layers.1.attention", "its input may be of any size"), ("layers.2.attention", "unknown"))))
    assert "1 module was not seen. 1 module has no bound." in text
    assert "Not seen layers.2.attention: unknown No bound layers.1.attention: its input may be of any size" in text


def test_an_absent_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vl_convert" else name)
    with pytest.raises(MissingExtraError, match=r"vl-convert-python is needed to .*: pip install 'attemper\[html\]'"):
        pages.report().to_html()


def test_a_report_saves_itself(tmp_path) -> None:
    pages.report(rows=()).save_html(tmp_path / "page.html")
    assert "no attention call was seen" in (tmp_path / "page.html").read_text("utf-8")
    with pytest.raises(ArgumentError, match="path: got a folder"):
        pages.report(rows=()).save_html(tmp_path)
