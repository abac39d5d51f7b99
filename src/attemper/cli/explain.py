"""The sub-command `explain`: the lesson on the terminal, or as a page."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from attemper.cli.output import close_stdout, progress, say, silenced, write_text
from attemper.files import check_writable, write_whole
from attemper.lesson import TOPICS, chapter, check_topic, question_of
from attemper.lesson.wording import WORDINGS
from attemper.report.lesson_terminal import print_chapter
from attemper.report.page import require_page

_LINE = 100


def command(
    topic: Annotated[str, typer.Argument(help="A topic such as why-sqrt-d; all of them if none is given.")] = "",
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page to this file instead.", show_default=False)
    ] = None,
    lang: Annotated[Literal["en", "zh"], typer.Option(help="The language: English or Chinese.")] = "en",
) -> None:
    """Explain why attention is scaled and what is asked after that, with figures that are measured here and now.

    Without TOPIC the topics are listed; with --html all of them become one page. Exit codes: 0 explained, 2 no such topic, or
    the page cannot be written.
    """
    names = [check_topic(topic)] if topic else list(TOPICS)
    if html is not None:
        _write_page(names, html, lang)
    elif topic:
        _print(topic, lang)
    else:
        widest = max(map(len, names))
        say([f"{name:<{widest}}  {question_of(name, lang)}" for name in names], hang=widest + 2)


def _write_page(names: list[str], path: Path, lang: str) -> None:
    require_page()
    check_writable(path, "--html")
    from attemper.report.page.lesson_page import lesson_page

    chapters = []
    with progress() as tell:
        for name in names:
            tell(name)
            chapters.append(chapter(name, lang))
    with silenced():
        write_whole(path, lesson_page(chapters, WORDINGS[lang]))
    say(
        [f"{path}: {len(names)} {'topic' if len(names) == 1 else 'topics'}, measured in {sum(c.seconds for c in chapters):.0f} s"]
    )


def _print(topic: str, lang: str) -> None:
    with progress() as tell:
        tell(topic)
        made = chapter(topic, lang)
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console = Console(file=sys.stdout, highlight=False, width=_LINE)
    with console.capture() as captured:  # rich itself would end the command with 1 where the reader has gone
        print_chapter(made, WORDINGS[lang], console)
    try:
        write_text(captured.get())
    except BrokenPipeError:
        close_stdout()
