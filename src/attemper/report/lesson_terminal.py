"""A chapter of a lesson on a terminal: the page's words, its picture as a table."""

from rich.console import Console
from rich.markdown import Markdown
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from attemper.report.lessons import Chapter, Picture, Wording
from attemper.report.page.lesson_page import picture_table

_VERDICTS = {"right": "green", "partly": "yellow", "wrong": "red"}


def print_chapter(chapter: Chapter, wording: Wording, console: Console) -> None:
    """Write the chapter."""
    console.print(Text(chapter.question, style="bold"))
    for part in chapter.parts:
        console.print()
        console.print(Text(part.title, style="bold cyan"))
        if part.text:
            console.print(Markdown(part.text))
        if part.key == "measurement":
            _print_picture(chapter.picture, console)
            console.print(Text(wording.made.format(seconds=f"{chapter.seconds:.1f}"), style="dim"))
        for item in part.items:
            console.print()
            verdict = (f"[{wording.verdicts[item.verdict]}] ", _VERDICTS[item.verdict]) if item.verdict else ""
            console.print(Text.assemble(verdict, (item.title, "bold")))
            console.print(Padding(Markdown(item.text), (0, 0, 0, 2)))


def _print_picture(picture: Picture, console: Console) -> None:
    console.print()
    table = Table(box=None, pad_edge=False, header_style="bold", title=picture.title, title_justify="left", title_style="italic")
    headings, rows = picture_table(picture)
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
