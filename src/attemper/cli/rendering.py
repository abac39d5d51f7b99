"""A report in each of the forms that a program reads, and which form a file's ending asks for."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

import attemper
from attemper.checker import RULES
from attemper.checker.folder import CONFIG, path_of
from attemper.cli.output import json_line
from attemper.errors import ArgumentError
from attemper.report import Report
from attemper.report.github import github_lines
from attemper.report.junit import junit_text
from attemper.report.sarif import sarif_text, to_sarif
from attemper.report.text import plain_text

FILE_FORMATS = {".json": "json", ".sarif": "sarif", ".xml": "junit", ".txt": "text"}


def format_of(file: str) -> str:
    """The format of a file by its ending.

    Raises:
        ArgumentError: no format has this ending.
    """
    found = FILE_FORMATS.get(Path(file).suffix.lower())
    if found is None:
        raise ArgumentError("--output", repr(file), f"a file that ends in {', '.join(FILE_FORMATS)}")
    return found


@dataclass(frozen=True)
class Rendering:
    """A report and what its forms depend on.

    Attributes:
        report: what to write; fail_on: the severity from which a check fails; model: as it was named.
        compared: whether a baseline was given. docs_url: where the documents are, for links to the page of each rule.
    """

    report: Report
    fail_on: str
    model: str | None
    compared: bool
    docs_url: str | None = None

    @property
    def names(self) -> dict[str, str]:
        """The few words for each code."""
        return {rule.code: rule.name for rule in RULES}

    def text(self, form: str) -> str:
        """The report in one of `attemper.cli.config.FORMATS`."""
        if form == "json":
            return json_line(self.report.to_dict())
        if form == "sarif":
            log = to_sarif(
                self.report,
                RULES,
                version=attemper.__version__,
                artifact=self._artifact,
                docs_url=self.docs_url,
                compared=self.compared,
            )
            return sarif_text(log)
        if form == "github":
            return github_lines(self.report, self.names, artifact=self._artifact)
        if form == "junit":
            return junit_text(self.report, RULES, self.fail_on)
        return plain_text(self.report, self.names) + "\n"

    @cached_property
    def _artifact(self) -> str | None:
        """The config.json of a model that is a folder below this one, as a relative path with slashes."""
        if self.model is None:
            return None
        config = (path_of(self.model) / CONFIG).absolute()
        here = Path.cwd()
        if not config.is_file() or not config.is_relative_to(here):
            return None
        return str(PurePosixPath(config.relative_to(here)))
