"""The shell: hashes that fit, escapes that hold, a page that asks for nothing."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from attemper.report.page.check_page import check_page
from attemper.report.page.shell import Script, render_page
from tests.report.page import pages


class Elements(HTMLParser):
    """The page as a browser's parser sees it: attributes and texts of the elements that matter."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], str]] = []
        self.open = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), ""))
        self.open = True

    def handle_data(self, data: str) -> None:
        if self.open:
            tag, attributes, text = self.found[-1]
            self.found[-1] = (tag, attributes, text + data)

    def handle_endtag(self, tag: str) -> None:
        self.open = False

    def all(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [(attributes, text) for name, attributes, text in self.found if name == tag]


def minimal(**data: object) -> str:
    context = dict.fromkeys(("tone", "verdict", "lead", "shared", "legend"), "")
    lists = {name: [] for name in ("facts", "tiles", "counts", "groups", "columns", "table", "missed", "notes")}
    return render_page(
        "check.html.j2",
        styles=(),
        scripts=[Script("let a = 1 && 2;")],
        data=data,
        title="<t>",
        rows=0,
        weights=None,
        **context,
        **lists,
    )


def test_the_policy_allows_what_the_page_holds_and_nothing_else() -> None:
    elements = Elements(check_page(pages.hostile()))
    (policy,) = [meta["content"] for meta, _ in elements.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    directives = {part.split()[0]: part.split()[1:] for part in policy.split(";")}
    code = [text for attributes, text in elements.all("script") if attributes.get("type") != "application/json"]
    ((_, style),) = elements.all("style")

    def hashed(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    assert directives == {
        "default-src": ["'none'"],
        "script-src": [hashed(text) for text in code],
        "style-src": [hashed(style)],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
    }


def test_no_element_names_another_file_and_none_carries_code_or_style() -> None:
    elements = Elements(check_page(pages.report(pages.finding())))
    for tag, attributes, _ in elements.found:
        assert not {"src", "srcset", "style", "action", "data"} & set(attributes), (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
        assert (attributes.get("href") or "#").startswith("#")


@pytest.mark.parametrize("text", pages.HOSTILE)
def test_data_comes_back_as_it_was_and_ends_no_element(text: str) -> None:
    page = minimal(given={"text": text, text: 1})
    (inside,) = [text for attributes, text in Elements(page).all("script") if attributes.get("id") == "given"]
    assert json.loads(inside) == {"text": text, text: 1}
    assert not set("<>&\u2028") & set(inside)


def test_a_script_that_would_end_its_element_is_refused() -> None:
    with pytest.raises(ValueError, match="what would end its element"):
        render_page("check.html.j2", styles=(), scripts=[Script("'</SCRIPT>'")], data={})


def test_there_is_no_unescaped_text_of_a_checkpoint() -> None:
    text = re.sub(r"<script.*?</script>|<style.*?</style>", "", check_page(pages.hostile()), flags=re.DOTALL)
    for hostile in pages.HOSTILE[:3]:
        assert hostile not in text
    assert "&lt;/script&gt;&lt;script&gt;window.pwned=1" in text
