"""The words of the lesson: the same topics, parts, figures and statements in both languages, and no number of their own."""

import re

import pytest

from attemper.lesson.making import compose
from attemper.lesson.reading import Section, evidence, labels, words
from attemper.lesson.sources import SOURCES
from attemper.lesson.topics import LANGUAGES, PARTLY, PARTS, RIGHT, TOPICS, VOICES, WRONG
from attemper.lesson.wording import HEADINGS, WORDINGS
from tests.lesson.measured import measured

BOTH = [(topic, language) for topic in TOPICS for language in LANGUAGES]


def texts_of(section: Section) -> list[str]:
    return [section.text, *section.items.values()]


def named(text: str) -> list[str]:
    """Figures and sources in the order in which a text names them, so that none can stand in another's place."""
    return re.findall(r"\{[^}]*\}|\[@[^\]]*\]", text)


def numbers(text: str) -> list[str]:
    """What a text says in digits, two or more: one digit may be a word in the other language."""
    prose = re.sub(r"\{[^}]*\}|\[@[^\]]*\]|`[^`\n]*`", "", text)
    return sorted(re.findall(r"\d·10[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+|\d[\d.]*\d[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]*", prose))


def formulas(text: str) -> list[str]:
    """The lines of a text's formulas without words, spaces and what each language has its own signs for."""
    lines = [line for block in re.findall(r"```math\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    return [re.sub(r"[A-Za-z]|[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]|[\s,:;.()×-]", "", line) for line in lines]


@pytest.mark.parametrize("topic", TOPICS)
def test_both_languages_say_the_same_things(topic: str) -> None:
    english, chinese = (words(topic, language) for language in LANGUAGES)
    assert list(english.sections) == list(chinese.sections)
    assert english.figures == chinese.figures
    for name, section in english.sections.items():
        other = chinese.sections[name]
        assert labels(section).keys() == labels(other).keys() if name == "picture" else len(section.items) == len(other.items)
        for ours, theirs in zip(texts_of(section), texts_of(other), strict=True):
            for kind, found in (("figures", named), ("numbers", numbers), ("formulas", formulas)):
                assert found(ours) == found(theirs), (name, kind, ours[:60])


@pytest.mark.parametrize(("topic", "language"), BOTH)
def test_a_topic_has_every_part(topic: str, language: str) -> None:
    told = words(topic, language)
    assert set(told.sections) == {*PARTS, "picture"}
    assert tuple(told.sections["voices"].items) == VOICES
    assert dict.fromkeys(told.sections["claims"].items) == dict.fromkeys(TOPICS[topic].claims)
    assert told.sections["follow-ups"].items
    assert all(section.text or section.items for section in told.sections.values())
    assert re.search(r"[\u4e00-\u9fff]", told.question) if language == "zh" else told.question.isascii() or "√" in told.question
    assert re.findall(r"\[@([a-z0-9-]+)\]", told.sections["reading"].text)


@pytest.mark.parametrize(("topic", "language"), BOTH)
def test_each_statement_is_quoted_and_rests_on_a_figure_or_a_source(topic: str, language: str) -> None:
    for name, text in words(topic, language).sections["claims"].items.items():
        statement, _, answer = text.partition("\n\n")
        assert statement.startswith("> "), name
        assert not evidence(statement), name
        assert evidence(answer), f"{name} names no figure and no source"


@pytest.mark.parametrize(("topic", "language"), BOTH)
def test_the_figures_are_those_of_the_measurement(topic: str, language: str) -> None:
    told, found = words(topic, language), measured(topic)
    assert told.figures == set(found.figures())
    stated = set(re.findall(r"\{([a-z0-9_]+):pm\}", told.sections["measurement"].text))
    assert stated == set(found.figures()), "a figure is not given with its uncertainty"
    series = set(labels(told.sections["picture"])) - {"title", "x", "y"}
    assert series == {point.series for point in found.points}


@pytest.mark.parametrize(("topic", "language"), BOTH)
def test_nothing_is_left_to_fill_in(topic: str, language: str) -> None:
    made = compose(topic, language, measured(topic), 0.1)
    texts = [text for part in made.parts for text in (part.text, *(item.text for item in part.items))]
    assert not [text for text in texts if re.search(r"[{}]|\[@", text)]
    assert [part.key for part in made.parts] == list(PARTS)


def test_no_number_that_is_measured_is_copied() -> None:
    # What stands in the words may be a setting or a limit, never a figure of the page with all its digits.
    for topic, language in BOTH:
        told = words(topic, language)
        prose = " ".join(text for part in told.sections.values() for text in (part.text, *part.items.values()))
        written = set(re.findall(r"(?<![\d.,])\d+\.\d{2,}(?![\d.])", re.sub(r"\{[^}]*\}|arXiv \S+", "", prose)))
        derived = {"0.99937", "0.894", "0.99", "0.43", "0.125", "0.09", "0.02", "1.25", "0.707"}
        assert written <= derived, (topic, language, written - derived)


def test_an_unknown_figure_or_source_is_refused() -> None:
    from attemper.lesson.reading import filled

    with pytest.raises(KeyError, match="no_such"):
        filled("{no_such}", {})
    with pytest.raises(KeyError, match="no-such"):
        filled("[@no-such]", {})


VERDICTS = {
    "variance-is-d": PARTLY, "paper-on-the-variance": WRONG, "gradients-vanish": PARTLY, "divide-by-d": PARTLY,
    "additive-needs-none": PARTLY, "additive-costs-more": WRONG, "overflow-is-a-symptom": PARTLY, "forty-overflows": WRONG,
    "flash-is-about-stability": WRONG, "safe-softmax": RIGHT, "layernorm-cannot": PARTLY, "temperature-is-learnable": RIGHT,
    "per-head-brings-little": PARTLY, "rope-keeps-norms": RIGHT, "heads-share": RIGHT, "module-has-a-scale": WRONG,
    "one-needs-none": RIGHT, "xavier-gives-one": PARTLY, "t5-divides": WRONG, "large-means-saturated": WRONG,
}  # fmt: skip
SAID = {"en": {RIGHT: "Right", PARTLY: "Partly", WRONG: "Wrong"}, "zh": {RIGHT: "对", PARTLY: "对一半", WRONG: "错"}}


def test_every_statement_stands_under_one_topic_with_its_verdict() -> None:
    found = [claim for topic in TOPICS.values() for claim in topic.claims.items()]
    assert sorted(found) == sorted(VERDICTS.items())


@pytest.mark.parametrize(("topic", "language"), BOTH)
def test_the_answer_to_a_statement_begins_with_its_verdict(topic: str, language: str) -> None:
    for name, text in words(topic, language).sections["claims"].items.items():
        answer = text.partition("\n\n")[2]
        assert re.match(r"Right|Partly|Wrong|对一半|对|错", answer).group() == SAID[language][TOPICS[topic].claims[name]], name


def test_a_paper_is_as_old_as_its_number() -> None:
    for source in SOURCES.values():
        assert bool(source.arxiv) != bool(source.github), source
        if source.arxiv:
            assert re.fullmatch(r"\d{4}\.\d{4,5}", source.arxiv), source
            assert source.name.endswith(f" 20{source.arxiv[:2]}"), source


def test_every_source_is_cited_and_every_heading_said() -> None:
    cited = {name for topic, language in BOTH for part in words(topic, language).sections.values()
             for text in (part.text, *part.items.values()) for name in re.findall(r"\[@([a-z0-9-]+)\]", text)}  # fmt: skip
    assert cited == set(SOURCES)
    for language in LANGUAGES:
        assert tuple(HEADINGS[language].parts) == PARTS
        assert tuple(HEADINGS[language].voices) == VOICES
        assert WORDINGS[language].language == language
