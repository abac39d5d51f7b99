"""A lesson as plain records: what the page and the terminal show, in one language, with every number already written in."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Item:
    """A part's part: a follow-up question and its answer, a voice, or a statement and what is so.

    Attributes:
        title: the question, the speaker or the statement; text: Markdown; verdict: "right", "partly", "wrong" or "".
    """

    title: str
    text: str
    verdict: str = ""


@dataclass(frozen=True)
class Part:
    """A section of a chapter; key: its name in every language; text: Markdown."""

    key: str
    title: str
    text: str
    items: tuple[Item, ...] = ()


@dataclass(frozen=True)
class Picture:
    """Lines to draw.

    Attributes:
        title: what is seen; x, y: what the axes carry; x_log, y_log: whether they are logarithmic.
        lines: the points (x, y) of each line, by its words.
    """

    title: str
    x: str
    y: str
    x_log: bool
    y_log: bool
    lines: Mapping[str, tuple[tuple[float, float], ...]]


@dataclass(frozen=True)
class Chapter:
    """A topic: name, question, parts in order, the picture that goes with the measurement, and how long that took."""

    name: str
    question: str
    parts: tuple[Part, ...]
    picture: Picture
    seconds: float


@dataclass(frozen=True)
class Wording:
    """What a page says around its chapters, in one language."""

    language: str
    title: str
    lead: str
    contents: str
    as_table: str
    no_scripts: str
    made: str
    dark: str
    light: str
    switch: str
    verdicts: Mapping[str, str]
