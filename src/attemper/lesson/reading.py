"""Reads a topic's file, and puts figures and sources where it names them."""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from attemper.lesson.figures import Figure
from attemper.lesson.sources import SOURCES

_FIGURE = re.compile(r"\{([a-z][a-z0-9_]*)(:pm)?\}")
_SOURCE = re.compile(r"\[@([a-z0-9-]+)\]")


@dataclass(frozen=True)
class Section:
    """What stands under a `## heading`: text up to the first `### heading`, then what stands under each of those."""

    text: str
    items: Mapping[str, str]


@dataclass(frozen=True)
class Words:
    """A topic's file: its question and its sections by name."""

    question: str
    sections: Mapping[str, Section]

    @property
    def figures(self) -> set[str]:
        """Names of the figures that it refers to."""
        return {name for text in self._texts() for name, _ in _FIGURE.findall(text)}

    def _texts(self) -> list[str]:
        return [text for each in self.sections.values() for text in (each.text, *each.items.values())]


@functools.cache
def words(topic: str, language: str) -> Words:
    """The file of a topic."""
    text = (resources.files("attemper.lesson.texts") / language / f"{topic}.md").read_text("utf-8")
    head, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    return Words(head.removeprefix("# ").strip(), dict(map(_section, sections)))


def labels(section: Section) -> dict[str, str]:
    """The lines `key: words` of a section."""
    return dict(line.split(": ", 1) for line in section.text.splitlines())


def filled(text: str, figures: Mapping[str, Figure]) -> str:
    """The text with its numbers and sources.

    Raises:
        KeyError: it names a figure or source that there is not.
    """

    def number(found: re.Match[str]) -> str:
        figure = figures[found[1]]
        return figure.with_margin() if found[2] else str(figure)

    return _SOURCE.sub(lambda found: SOURCES[found[1]].cited, _FIGURE.sub(number, text))


def evidence(text: str) -> set[str]:
    """Names of the figures and of the sources that a text rests on."""
    return {name for name, _ in _FIGURE.findall(text)} | set(_SOURCE.findall(text))


def _section(text: str) -> tuple[str, Section]:
    heading, _, body = text.partition("\n")
    first, *items = re.split(r"^### ", body, flags=re.MULTILINE)
    parted = (item.partition("\n") for item in items)
    return heading.strip(), Section(first.strip(), {name.strip(): under.strip() for name, _, under in parted})
