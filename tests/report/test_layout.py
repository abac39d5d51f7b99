"""The small pieces of the layout."""

import json
import math
from dataclasses import replace

import pytest

from attemper.report.layout import number, together
from attemper.report.names import safe, shortened
from attemper.report.text import plain_text
from tests.reports import by_weights, finding, report


@pytest.mark.parametrize(
    ("value", "text"),
    [(75.74803, "75.748"), (-0.5, "−0.5"), (1.0, "1"), (1e-7, "1e−07"), (math.inf, "inf"), (-math.inf, "−inf"), (math.nan, "—")],
)
def test_number(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["a.0.b"], "a.0.b"),
        (["a.2.b", "a.0.b", "a.1.b"], "a.[0-2].b"),
        (["a.0.b", "a.3.b"], "a.[0, 3].b"),
        (["a.0", "a.1"], "a.[0-1]"),
        (["0.b", "1.b"], "[0-1].b"),
        (["a.0.b", "a.x.b"], "a.0.b, a.x.b"),
        (["a.0.b", "a.0.b.c"], "a.0.b, a.0.b.c"),
        (["a.0.b", "a.0.b call 1"], "a.0.b, a.0.b call 1"),
        (["v", "w", "x", "y", "z"], "v, w, x, y and 1 more"),
    ],
)
def test_together(names: list[str], text: str) -> None:
    assert together(names) == text


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("layers.0", "layers.0"),
        ("größe 注意", "größe 注意"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\nb\tc", "a\\x0ab\\x09c"),
        ("\u202eab\u2028", "\\u202eab\\u2028"),
        ("\U000e0041", "\\U000e0041"),
    ],
)
def test_safe(given: str, shown: str) -> None:
    assert safe(given) == shown


def test_shortened_in_the_middle() -> None:
    assert shortened("layers.0") == "layers.0"
    assert shortened("a" * 50 + "b" * 50, 11) == "aaaaa…bbbbb"
    assert len(shortened("x" * 5000, 10)) == 10


def test_a_long_name_makes_no_wide_table_and_is_whole_in_json() -> None:
    long = "layers." + "x" * 5000
    one = report(finding(module=long), unseen=((long, "a reason"),))
    one = replace(one, rows=(replace(one.rows[0], module=long), *one.rows[1:]))
    weighed = by_weights()
    weighed = replace(weighed, weights=tuple(replace(row, module=long) for row in weighed.weights))
    for each in (one, weighed):
        text = plain_text(each)
        assert max(map(len, text.splitlines())) < 240
        assert "xxx…xxx" in text
        assert long in json.dumps(each.to_dict())
