"""What the errors of other libraries become before a message of this one quotes them."""

import re

import pytest

from attemper.errors import in_one_line
from tests.running import ROOT


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (ValueError("Input should be\n  a number\t[type=x]\r\n"), "Input should be a number [type=x]"),
        (OSError(2, "No such file"), "[Errno 2] No such file"),
        ("one\n\n two", "one two"),
        (ValueError(), ""),
    ],
)
def test_lines_are_joined_by_one_space(said: object, line: str) -> None:
    assert in_one_line(said) == line


def test_nothing_else_joins_the_lines_of_an_error() -> None:
    by_hand = re.compile(r"""(["']) \1\.join\((str\(.*\)|message|error)\.split\(\)\)""")
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "src" / "attemper").rglob("*.py")
        if by_hand.search(path.read_text("utf-8"))
    }
    assert found == {"src/attemper/errors.py"}
