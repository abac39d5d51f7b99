"""The API page has every public name."""

import importlib
import re

import pytest

import attemper
from docs.pages.api import ELSEWHERE, MODULES, api_files, public
from tests.running import ROOT

FILES = api_files()


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_on_the_page(module: str) -> None:
    text = FILES[f"api_{module.replace('.', '_')}"]
    for name, _ in public(module):
        assert re.search(rf":: {re.escape(module)}\.{name}$|`{name} <", text, re.MULTILINE), f"{module}.{name}"
    assert f"{{include}} generated/api_{module.replace('.', '_')}.md" in (ROOT / "docs" / "api.md").read_text("utf-8")


def test_no_name_of_the_root_is_left_out() -> None:
    shown = {name for name, _ in public("attemper")}
    modules = {f"attemper.{name}" for name in attemper.__all__} - {f"attemper.{name}" for name in shown}
    assert modules <= {*MODULES, *ELSEWHERE}
    assert {"check", "use", "watch"} <= shown  # loaded on demand: autodoc alone does not see them


@pytest.mark.parametrize("module", ELSEWHERE)
def test_modules_with_a_page_of_their_own_are_whole_there(module: str) -> None:
    page = (ROOT / "docs" / f"{ELSEWHERE[module]}.md").read_text("utf-8")
    found = re.search(rf"automodule:: {re.escape(module)}\n   :members:(.*)\n   :imported-members:", page)
    assert found
    listed = set(filter(None, re.split(r"[ ,]+", found[1])))
    assert not listed or listed == set(importlib.import_module(module).__all__)


def test_each_thing_is_shown_once() -> None:
    shown = [name for text in FILES.values() for name in re.findall(r"^\.\. auto\w+:: \S+\.(\w+)$", text, re.MULTILINE)]
    assert len(shown) == len(set(shown))
