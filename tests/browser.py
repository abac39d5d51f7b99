"""A headless Chromium for tests of pages: what a page asked for, said and tried is kept, and none of it may be anything."""

import os
import shutil
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
_WATCH = """
window.violations = [];
addEventListener("securitypolicyviolation", (event) => window.violations.push(event.violatedDirective + " " + event.blockedURI));
"""


def chromium() -> Path | None:
    """The browser that is installed here, if one is."""
    found = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    return next((Path(path) for path in found if path), None)


@pytest.fixture(scope="session")
def browser() -> Generator[Browser]:
    """One browser for all tests; each page gets a profile of its own."""
    path = chromium()
    if path is None:
        words = "no chromium is installed; on Debian: apt-get install chromium"
        if os.environ.get("ATTEMPER_REQUIRE_BROWSER") == "1":
            pytest.fail(words)
        pytest.skip(words)
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield opened
        opened.close()


@dataclass
class Visit:
    """A page that was opened, and what it did: requests beyond itself, words in the console, dialogs."""

    page: Page
    requests: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)

    @property
    def violations(self) -> list[str]:
        """What the page's policy stopped."""
        return self.page.evaluate("window.violations")

    def assert_quiet(self) -> None:
        """Nothing was loaded, said, asked or stopped."""
        assert (self.requests, self.said, self.dialogs, self.violations) == ([], [], [], [])

    def text(self, selector: str) -> str:
        """The text of the only element that fits."""
        return self.page.locator(selector).inner_text()


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Generator[Callable[..., Visit]]:
    """A function that opens a page, given as text; at the end no page may have loaded, said or tried anything."""
    visits: list[Visit] = []

    def open_page(text: str, **options: Any) -> Visit:
        file = tmp_path / f"{len(visits)}.html"
        file.write_text(text, "utf-8")
        visits.append(visit(browser, file, **options))
        return visits[-1]

    yield open_page
    for each in visits:
        each.assert_quiet()
        each.page.context.close()


def grave_faults(shown: Visit) -> list[tuple[str, list[str]]]:
    """What axe finds on the page that is serious or critical, with the elements; the test is skipped where axe-core is not."""
    axe = Path(sys.prefix) / "axe" / "node_modules" / "axe-core" / "axe.min.js"
    if not axe.exists():
        pytest.skip("axe-core is not here; `make test` fetches it where there is npm")
    shown.page.evaluate(axe.read_text("utf-8"))
    found = shown.page.evaluate("axe.run()")["violations"]
    serious = [each for each in found if each["impact"] in ("serious", "critical")]
    return [(each["id"], [node["html"][:120] for node in each["nodes"][:3]]) for each in serious]


def visit(
    browser: Browser, file: Path, *, width: int = 1400, theme: str = "light", fragment: str = "", scripts: bool = True
) -> Visit:
    """Open a file and wait until it says that it is ready, if its scripts are to run."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme, reduced_motion="reduce")
    page = context.new_page()
    page.add_init_script(_WATCH)
    opened = Visit(page)
    address = file.as_uri()
    page.on("request", lambda request: opened.requests.append(request.url) if request.url != address else None)
    page.on("console", lambda message: opened.said.append(message.text))
    page.on("pageerror", lambda error: opened.said.append(str(error)))
    page.on("dialog", lambda dialog: (opened.dialogs.append(dialog.message), dialog.dismiss()))
    page.goto(address + fragment)
    if scripts:
        page.wait_for_selector("html[data-ready]", state="attached", timeout=30_000)
    return opened
