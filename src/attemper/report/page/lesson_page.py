"""The page of a lesson: its chapters with their pictures, in one file and one language."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attemper.report.lessons import Chapter, Picture, Wording
from attemper.report.page.charts import themes, vega_script
from attemper.report.page.dials import dials_part
from attemper.report.page.dials_words import WORDS
from attemper.report.page.lesson_picture import lesson_picture
from attemper.report.page.requirements import require_page
from attemper.report.page.shell import render_page, script

if TYPE_CHECKING:
    from markupsafe import Markup


def lesson_page(chapters: Sequence[Chapter], wording: Wording) -> str:
    """The lesson as one HTML file, as text.

    Raises:
        MissingExtraError: a package of the extra `html` is absent.
    """
    require_page()
    pictures = {
        chapter.name: {"chart": lesson_picture(chapter.picture), "points": _points(chapter.picture)} for chapter in chapters
    }
    # Beside all chapters, not beside one that somebody asked for.
    dials = dials_part(WORDS[wording.language]) if len(chapters) > 1 else None
    return render_page(
        "lesson.html.j2",
        styles=["lesson.css", *(dials.styles if dials else ())],
        scripts=[vega_script(), *([dials.script] if dials else []), script("chart.js", "lesson.js")],
        data={"data": {"pictures": pictures, "themes": themes()}, **(dials.data if dials else {})},
        dials=dials.html if dials else "",
        language=wording.language,
        title=wording.title,
        words=wording,
        chapters=chapters,
        markdown=_markdown(),
        table=picture_table,
    )


def picture_table(picture: Picture) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of a picture's numbers: a row for each place on the horizontal axis."""
    places = sorted({x for points in picture.lines.values() for x, _ in points})
    found = {name: dict(points) for name, points in picture.lines.items()}
    rows = [[f"{x:.4g}", *(f"{points[x]:.3g}" if x in points else "" for points in found.values())] for x in places]
    return [picture.x, *picture.lines], rows


def _points(picture: Picture) -> list[dict[str, Any]]:
    return [{"x": x, "y": float(f"{y:.4g}"), "line": line} for line, points in picture.lines.items() for x, y in points]


def _markdown():
    """Markdown to HTML; HTML within it is shown as text. A table that is wider than the page can be moved, and bears a label."""
    from markdown_it import MarkdownIt
    from markupsafe import Markup, escape

    parser = MarkdownIt("commonmark", {"html": False}).enable("table")

    def table_open(_renderer, _tokens, _index, _options, env) -> str:
        return f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(env["label"])}">\n<table>\n'

    parser.add_render_rule("table_open", table_open)
    parser.add_render_rule("table_close", lambda *_: "</table>\n</div>\n")

    def rendered(text: str, label: str) -> "Markup":
        return Markup(parser.render(text, {"label": label}))

    return rendered
