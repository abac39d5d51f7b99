"""The page of the lesson, as text and in a browser."""

import functools
import itertools
import re
from collections.abc import Callable
from html.parser import HTMLParser

import pytest

from attemper.lesson.making import compose
from attemper.lesson.sources import SOURCES
from attemper.lesson.topics import LANGUAGES, TOPICS
from attemper.lesson.wording import WORDINGS
from attemper.report.lessons import Chapter, Item, Part, Picture
from attemper.report.page.lesson_page import lesson_page, picture_table
from tests.browser import Visit, grave_faults
from tests.lesson.measured import measured


@functools.cache
def page(language: str) -> str:
    return lesson_page([compose(topic, language, measured(topic), 0.1) for topic in TOPICS], WORDINGS[language])


class Elements(HTMLParser):
    """The attributes of all elements, and the words outside of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = tag
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.inside not in ("script", "style"):
            self.words.append(data)


@pytest.mark.parametrize("language", LANGUAGES)
def test_it_is_one_small_file_with_every_topic(language: str) -> None:
    text = page(language)
    assert len(text.encode()) < 2e6
    elements = Elements(text)
    ids = [attrs["id"] for _, attrs in elements.found if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert set(TOPICS) <= set(ids)
    targets = [attrs["href"] or "" for tag, attrs in elements.found if tag == "a"]
    assert {target[1:] for target in targets if target.startswith("#")} == set(TOPICS)
    assert {target for target in targets if not target.startswith("#")} == {source.address for source in SOURCES.values()}
    assert not [attrs for _, attrs in elements.found if {"style", "src", "onclick"} & attrs.keys()]
    levels = [int(tag[1]) for tag, _ in elements.found if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    (policy,) = [attrs["content"] or "" for _, attrs in elements.found if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert dict(elements.found[0][1])["lang"] == language


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_figure_stands_on_it_with_its_uncertainty(language: str) -> None:
    words = " ".join(" ".join(Elements(page(language)).words).split())
    for topic in TOPICS:
        for name, figure in measured(topic).figures().items():
            assert figure.with_margin() in words, (topic, name)


def test_a_picture_as_a_table() -> None:
    picture = Picture("t", "x", "y", True, False, {"one": ((1.0, 0.5), (2.0, 1234.5)), "two": ((2.0, 3.0),)})
    assert picture_table(picture) == (["x", "one", "two"], [["1", "0.5", ""], ["2", "1.23e+03", "3"]])


def test_text_is_no_markup() -> None:
    bad = "<img src=x onerror=alert(1)>"
    chapter = Chapter(
        "n", bad, (Part("claims", bad, bad, (Item(bad, bad, "wrong"),)),), Picture(bad, "x", "y", False, False, {}), 0
    )
    text = lesson_page([chapter], WORDINGS["en"])
    assert "<img" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)


@pytest.fixture
def opened(show: Callable[..., Visit]):
    """A function that opens the page."""

    def open_page(language: str, **options) -> Visit:
        return show(page(language), **options)

    return open_page


@pytest.mark.slow
@pytest.mark.parametrize(("language", "theme", "width"), [("en", "light", 390), ("zh", "dark", 1400)])
def test_every_picture_is_drawn_and_nothing_is_wider_than_the_page(opened, language: str, theme: str, width: int) -> None:
    shown = opened(language, theme=theme, width=width)
    assert shown.page.locator(".picture canvas").count() == len(TOPICS)
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= width
    button = shown.page.locator("#theme")
    before = button.inner_text()
    button.click()
    assert button.inner_text() != before
    assert {before, button.inner_text()} == {WORDINGS[language].dark, WORDINGS[language].light}
    assert shown.page.locator("main img, main iframe").count() == 0


@pytest.mark.slow
@pytest.mark.parametrize("language", LANGUAGES)
def test_no_number_is_broken_on_a_narrow_screen(opened, language: str) -> None:
    shown = opened(language, width=360)
    broken = """() => [...document.querySelectorAll(".part td")].flatMap((cell) => {
      const walk = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
      const found = [];
      for (let node = walk.nextNode(); node; node = walk.nextNode()) {
        for (const each of node.data.matchAll(/[0-9.]+/g)) {
          const range = document.createRange();
          range.setStart(node, each.index);
          range.setEnd(node, each.index + each[0].length);
          if (range.getClientRects().length > 1) found.push(each[0]);
        }
      }
      return found;
    })"""
    assert shown.page.locator(".part td").count() > 100
    assert shown.page.evaluate(broken) == []
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.mark.slow
@pytest.mark.parametrize(("language", "theme"), [("en", "dark"), ("zh", "light")])
def test_axe_finds_nothing_serious(opened, language: str, theme: str) -> None:
    shown = opened(language, theme=theme)
    assert not grave_faults(shown)
