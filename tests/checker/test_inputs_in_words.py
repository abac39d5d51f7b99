"""Several inputs are described once where they say the same but for numbers, and only then."""

import pytest

from attemper.checker.inputs import Inputs
from attemper.checker.inputs_in_words import in_words


def inputs(description: str, part: int = 0) -> Inputs:
    return Inputs((), {}, description, part=part)


def passages(name: str, *tails: str) -> list[Inputs]:
    return [inputs(f"{name}, passage {part} of {len(tails)}, {tail}", part) for part, tail in enumerate(tails, 1)]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([inputs("given: x [2, 3]")], "given: x [2, 3]"),
        (passages("a7.txt", "41 tokens", "37 tokens", "43 tokens"), "a7.txt, passages 1–3 of 3, 37–43 tokens"),
        (
            passages("a.txt", "61 tokens, cut from 83", "61 tokens, cut from 79", "53 tokens"),
            "a.txt, passages 1–2 of 3, 61 tokens, cut from 79–83; a.txt, passage 3 of 3, 53 tokens",
        ),
        ([inputs("a1.txt, 11 tokens", 1), inputs("a2.txt, 13 tokens", 1)], "a1.txt, 11 tokens; a2.txt, 13 tokens"),
        (
            [*passages("a1.txt", "11 tokens", "13 tokens"), *passages("a2.txt", "17 tokens", "17 tokens")],
            "a1.txt, passages 1–2 of 2, 11–13 tokens; a2.txt, passages 1–2 of 2, 17 tokens",
        ),
        ([inputs("given: x [2, 3]"), inputs("given: x [2, 5]")], "given: x [2, 3]; given: x [2, 5]"),
    ],
)
def test_passages_of_one_text_are_described_once(given: list[Inputs], words: str) -> None:
    assert in_words(given) == words
