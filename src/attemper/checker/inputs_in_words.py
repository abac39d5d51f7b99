"""What several inputs are, in words: the passages of one text are described once, with the numbers in which they differ."""

import itertools
import re
from collections.abc import Iterable, Sequence

from attemper.checker.inputs import Inputs

_NUMBER = re.compile(r"(\d+)")


def in_words(inputs: Iterable[Inputs]) -> str:
    """Their descriptions; neighbouring passages of a text that say the same but for numbers are one: "passages 1–3 of 3"."""
    texts: list[list[str]] = []
    for each in inputs:
        if each.part > 1 and texts:
            texts[-1].append(each.description)
        else:
            texts.append([each.description])
    alike = (list(group) for text in texts for _, group in itertools.groupby(text, key=lambda words: _NUMBER.sub("0", words)))
    return "; ".join(map(_as_one, alike))


def _as_one(descriptions: Sequence[str]) -> str:
    if len(descriptions) == 1:
        return descriptions[0]
    words = "".join(map(_range, zip(*map(_NUMBER.split, descriptions), strict=True)))
    return words.replace(", passage ", ", passages ", 1)


def _range(piece: tuple[str, ...]) -> str:
    if len(set(piece)) == 1:
        return piece[0]
    numbers = sorted(map(int, piece))
    return f"{numbers[0]}–{numbers[-1]}"
