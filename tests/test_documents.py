"""The documents stay true: what they name exists, what they show runs."""

import importlib.metadata
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

import attemper
from docs.pages.commands import commands_list
from tests import peers, real_models
from tests.running import ROOT, named, run
from tests.walking import needs

WALKED = [*sorted((ROOT / "docs" / "tutorials").glob("*.md")), ROOT / "docs" / "interoperability.md"]
FINDERS = {"minilm": lambda: real_models.find("all_minilm_l6_v2/model.zip"), "peers": peers.find}
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted({*(ROOT / "docs").glob("*.md"), *WALKED})]


@pytest.mark.parametrize("name", attemper.__all__)
def test_a_public_name_is_in_the_documents(name: str) -> None:
    text = "\n".join(path.read_text("utf-8") for path in DOCUMENTS)
    assert re.search(rf"\battemper\.{name}\b", text), f"no document names attemper.{name}"


def test_the_change_log_has_this_version() -> None:
    assert re.search(rf"^## {re.escape(attemper.__version__)}\b", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert importlib.metadata.version("attemper") == attemper.__version__, "install it again: make clean, then make test"


def blocks(path: Path, *languages: str) -> list[str]:
    text = path.read_text("utf-8")
    return [
        body for language, body in re.findall(r"^```(\S+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL) if language in languages
    ]


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if blocks(path, "python") and path not in WALKED], ids=named)
def test_python_in_the_documents_runs_and_prints_what_they_say(path: Path) -> None:
    printed = run(sys.executable, "-c", "\n".join(blocks(path, "python")))
    shown = re.findall(
        r"^```python\n.*?^```\n+(?:It prints:\n+```text\n(.*?)^```)?", path.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    assert printed == "".join(shown)


@pytest.mark.parametrize("path", WALKED, ids=named)
def test_a_page_that_is_walked_shows_what_its_blocks_and_commands_print(path: Path) -> None:
    for need in needs(path):
        FINDERS[need]()
    run(sys.executable, "-m", "tests.walking", str(path))


def test_each_block_of_the_readme_runs_by_itself() -> None:
    found = blocks(ROOT / "README.md", "python")
    assert len(found) > 1
    for block in found[1:]:  # the first was run in front of the others
        run(sys.executable, "-c", block)


def spans(path: Path) -> list[str]:
    """What stands between backticks in the text, outside of blocks."""
    text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


def command_lines() -> list[tuple[str, str]]:
    found = []
    for path in DOCUMENTS:
        lines = [line.removeprefix("$ ") for block in blocks(path, "console", "sh", "bash") for line in block.splitlines()]
        found += [(named(path), re.split(" #| \\| ", line)[0].strip()) for line in [*lines, *spans(path)]]
    return found


@cache
def help_of(*words: str) -> str:
    return run(sys.executable, "-m", "attemper", *words, "--help")


def test_commands_in_the_documents_exist() -> None:
    lines = [(path, line.split()) for path, line in command_lines() if line.startswith("attemper ")]
    assert lines
    for path, (_, *words) in lines:
        verbs = [word for word in words if not word.startswith("-")]
        verbs = verbs[: 2 if verbs[:1] == ["lab"] else 1]
        for place, verb in enumerate(verbs):
            text = help_of(*verbs[:place])
            assert re.search(rf"\b{re.escape(verb)}\b", text), (
                f"{path}: attemper {' '.join(verbs[:place])} --help does not know {verb}"
            )
        for word in words:
            option = word.partition("=")[0]
            known = not option.startswith("-") or option in help_of(*verbs)
            assert known, f"{path}: attemper {' '.join(verbs)} --help does not know {option}"


@pytest.mark.parametrize(
    ("verb", "page"),
    [
        ("check", "check"),
        ("compare", "compare"),
        ("explain", "explain"),
        ("fix", "fix"),
        ("top", "runs"),
        ("report", "runs"),
        ("lab run", "lab"),
        ("lab report", "lab"),
    ],
)
def test_options_of_a_command_are_in_its_document(verb: str, page: str) -> None:
    options = set(re.findall(r"--[a-z][a-z-]+", help_of(*verb.split()))) - {"--help"}
    text = (ROOT / "docs" / f"{page}.md").read_text("utf-8")
    assert options
    assert not {option for option in options if f"`{option}" not in text}


def test_no_two_pages_have_one_title() -> None:
    pages = [path for path in DOCUMENTS if path.parent != ROOT]
    titles = [re.findall(r"^# (.+)", path.read_text("utf-8"), re.MULTILINE)[0] for path in pages]
    assert len(titles) > 20
    assert sorted(set(titles)) == sorted(titles)


def test_options_in_the_text_exist() -> None:
    ours = "".join(path.read_text("utf-8") for folder in ("benchmarks", "tests") for path in (ROOT / folder).rglob("*.py"))
    known = {*re.findall(r"--[a-z][a-z-]+", commands_list()), *re.findall(r"add_argument\(\"(--[a-z-]+)", ours), "--help"}
    used = {(named(path), option) for path in DOCUMENTS for span in spans(path) for option in re.findall(r"^--[a-z-]+", span)}
    assert len(used) > 40
    assert not {each for each in used if each[1] not in known}


def test_extras_in_the_documents_exist() -> None:
    known = set(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"])
    used = {
        (named(path), extra)
        for path in DOCUMENTS
        for extras in re.findall(r"(?:attemper|'\.)\[([a-z,]+)\]", path.read_text("utf-8"))
        for extra in extras.split(",")
    }
    assert len(used) > 10
    assert not {each for each in used if each[1] not in known}


@pytest.mark.parametrize("path", [*ROOT.glob("*.md"), *(ROOT / "src").rglob("*.md")], ids=named)
def test_links_of_pages_outside_the_site_lead_somewhere(path: Path) -> None:  # in the site, Sphinx sees to it
    text = re.sub(r"`[^`\n]+`", "", path.read_text("utf-8"))
    links = [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r'(?:src|srcset|href)="([^"]+)"', text)]
    assert path.name != "README.md" or len(links) > 10
    inside = [link.partition("#")[0] for link in links if not link.startswith("https://")]
    assert not [link for link in inside if not (path.parent / link).exists()]


def test_make_targets_in_the_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    used = {(path, words[1]) for path, line in command_lines() if len(words := line.split()) > 1 and words[0] == "make"}
    assert used
    assert not {(path, target) for path, target in used if target not in targets}
