"""What other libraries say is cut where a reader sees that it is cut."""

import pytest

from attemper.checker.options import one_line

SENTENCE = "It does not support this, and says so at some length, with a comma here and there."  # 82 characters


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("short", "ValueError: short"),
        ("two\n\n  lines ", "ValueError: two lines"),
        ("", "ValueError"),
        (" ".join([SENTENCE] * 4), f"ValueError: {' '.join([SENTENCE] * 3)} …"),
        ("word " * 80, f"ValueError: {'word ' * 59}…"),
        ("x" * 400, f"ValueError: {'x' * 298} …"),
        ("y" * 300, f"ValueError: {'y' * 300}"),
    ],
    ids=["short", "lines", "empty", "sentences", "words", "one word", "as long as may be"],
)
def test_one_line(said: str, line: str) -> None:
    assert one_line(ValueError(said)) == line
