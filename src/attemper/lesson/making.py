"""Makes chapters: measures a topic, then puts the figures into its words."""

import importlib
import time
from collections.abc import Mapping

import torch

from attemper.lesson.figures import Figure, Measured
from attemper.lesson.reading import Section, filled, labels, words
from attemper.lesson.topics import PARTS, TOPICS, check_topic
from attemper.lesson.wording import HEADINGS
from attemper.report.lessons import Chapter, Item, Part, Picture


def measure(topic: str, seed: int = 0) -> Measured:
    """Measure a topic's figures; another seed draws other random numbers."""
    place = f"attemper.lesson.measurements.{check_topic(topic).replace('-', '_')}"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are small: more threads gain little, and where others want the cores they lose a lot
    try:
        return importlib.import_module(place).measure(seed)
    finally:
        torch.set_num_threads(threads)


def question_of(topic: str, language: str) -> str:
    """The question of a topic."""
    return words(topic, language).question


def chapter(topic: str, language: str, seed: int = 0) -> Chapter:
    """A topic in one language, measured now."""
    started = time.monotonic()
    measured = measure(topic, seed)
    return compose(topic, language, measured, time.monotonic() - started)


def compose(topic: str, language: str, measured: Measured, seconds: float) -> Chapter:
    """A topic's words around figures that were measured before."""
    told = words(topic, language)
    figures = measured.figures()
    parts = tuple(_part(topic, key, told.sections[key], figures, language) for key in PARTS)
    return Chapter(topic, told.question, parts, _picture(topic, told.sections["picture"], measured), seconds)


def _part(topic: str, key: str, section: Section, figures: Mapping[str, Figure], language: str) -> Part:
    headings = HEADINGS[language]
    items = []
    for name, text in section.items.items():
        put = filled(text, figures)
        if key == "claims":
            statement, _, rest = put.partition("\n\n")
            items.append(Item(statement.removeprefix("> "), rest, TOPICS[topic].claims[name]))
        else:
            items.append(Item(headings.voices[name] if key == "voices" else name, put))
    return Part(key, headings.parts[key], filled(section.text, figures), tuple(items))


def _picture(topic: str, section: Section, measured: Measured) -> Picture:
    said = labels(section)
    lines: dict[str, tuple[tuple[float, float], ...]] = {}
    for point in measured.points:
        name = said[point.series]
        lines[name] = (*lines.get(name, ()), (point.x, point.y))
    return Picture(said["title"], said["x"], said["y"], TOPICS[topic].x_log, TOPICS[topic].y_log, lines)
