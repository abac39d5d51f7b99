"""`Report`: what `attemper.check` returns."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from attemper.files import check_writable, write_whole
from attemper.report.records import Outcome
from attemper.report.schema import outcome_fields, to_dict
from attemper.report.text import plain_text

if TYPE_CHECKING:
    from attemper.report.page import RuleWords


@dataclass(frozen=True)
class Report(Outcome):
    """What `attemper.check` returns; as text, it is what the command prints. Its attributes are those of `Outcome`."""

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready data; the layout is described in `attemper.report.schema`."""
        return to_dict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The report that `to_dict` wrote.

        Args:
            data: what `to_dict` returned, or the same after JSON.

        Raises:
            ArgumentError: another version of the layout, or a part is missing.
        """
        return cls(**outcome_fields(data))

    def to_html(self, rules: "Mapping[str, RuleWords] | None" = None) -> str:
        """The report as a page: one HTML file that needs nothing else, with a map of every head.

        Args:
            rules: names and explanations by code, such as `{rule.code: rule for rule in attemper.checker.RULES}`.

        Raises:
            MissingExtraError: a package of the extra `html` is absent.
        """
        from attemper.report.page import check_page

        return check_page(self, rules)

    def save_html(self, path: "str | os.PathLike[str]", rules: "Mapping[str, RuleWords] | None" = None) -> None:
        """Write the page of `to_html` to a file, whole or not at all.

        Args:
            path: the file; one that is there is replaced.
            rules: as for `to_html`.

        Raises:
            ArgumentError: a folder, or a place where nothing can be written; said before the page is made.
            MissingExtraError: a package of the extra `html` is absent.
            OSError: the disk is full, or the like; what stood there before still does.
        """
        check_writable(path, "path")
        write_whole(path, self.to_html(rules))

    def __str__(self) -> str:
        return plain_text(self)
