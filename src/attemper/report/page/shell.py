"""The shell of every page: one HTML file that loads nothing and runs only the scripts that it was written with.

What it must hold:
- text is escaped by jinja2, data by jinja2's own JSON filter: neither can end an element or begin one;
- the policy names the hash of each script and of the style sheet, so that what a checkpoint smuggled in would not run;
- the policy forbids every request, so that opening the page tells nobody.
"""

import base64
import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


@dataclass(frozen=True)
class Script:
    """Code that a page runs: a module, so that its names stay its own and it waits for the document."""

    code: str


def render_page(
    template: str,
    *,
    styles: Sequence[str],
    scripts: Sequence[Script],
    data: Mapping[str, Any],
    **context: Any,
) -> str:
    """The text of one page.

    Args:
        template: file in `templates/` that extends page.html.j2.
        styles: style sheets in `templates/`, put behind page.css.
        scripts: run in this order, when the document is there.
        data: JSON-ready values by the id of the element that holds them; a script reads them from there.
        context: what the template asks for.
    """
    from jinja2.utils import htmlsafe_json_dumps

    loaded = _environment()
    style = _joined("page.css", *styles)
    theme = Script(source("theme.js"))
    everything = [theme, *scripts]
    return loaded.get_template(template).render(
        policy=_policy([each.code for each in everything], style),
        style=_element(style),
        theme=_element(theme.code),
        scripts=[_element(each.code) for each in scripts],
        data={name: htmlsafe_json_dumps(value, separators=(",", ":"), allow_nan=False) for name, value in data.items()},
        **context,
    )


def render_part(template: str, **context: Any) -> "Markup":
    """A piece of a page from a file in `templates/`, to be put into a page's own template as it is."""
    from markupsafe import Markup

    return Markup(_environment().get_template(template).render(**context))


def script(*names: str) -> Script:
    """One script of several files in `templates/`, which see each other's names."""
    return Script(_joined(*names))


def source(name: str) -> str:
    """The text of a file in `templates/`."""
    loader = _environment().loader
    assert loader is not None
    return loader.get_source(_environment(), name)[0]


@functools.cache
def _environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("attemper.report.page", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _joined(*names: str) -> str:
    return "\n".join(source(name) for name in names)


def _element(text: str) -> "Markup":
    """The inside of a script or style element. Nothing escapes there, so what would end the element is refused."""
    from markupsafe import Markup

    lowered = text.lower()
    if "</script" in lowered or "</style" in lowered or "<!--" in lowered:
        raise ValueError("a script or style sheet of a page holds what would end its element")
    return Markup(text)


def _policy(scripts: Sequence[str], style: str) -> str:
    allowed = " ".join(map(_hash, scripts))
    return f"default-src 'none'; script-src {allowed}; style-src {_hash(style)}; base-uri 'none'; form-action 'none'"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
