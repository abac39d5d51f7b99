"""What a benchmark found: tables that are printed as they grow, bars that are held or missed, and their place in a document."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple


class Check(NamedTuple):
    """One figure and the bar it has to hold; a figure that is not a number holds none."""

    what: str
    got: float
    bar: float
    at_most: bool

    @property
    def held(self) -> bool:
        """Whether the bar is held."""
        return self.got <= self.bar if self.at_most else self.got >= self.bar

    def __str__(self) -> str:
        return f"{self.what}: {self.got:.3g}, bar {'≤' if self.at_most else '≥'} {self.bar:.3g}"


@dataclass(frozen=True)
class Table:
    """Rows of text under a title, printed one by one; spaces at the end of a column's name make it as wide as its cells."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def add(self, *cells: str) -> None:
        """Append a row and print it."""
        assert len(cells) == len(self.columns), f"{self.title}: {len(cells)} cells for {len(self.columns)} columns"
        self.rows.append(cells)
        self.show(cells)

    def show(self, cells: tuple[str, ...]) -> None:
        """Print cells, each as wide as its column's head."""
        print("  ".join(cell.rjust(len(column)) for cell, column in zip(cells, self.columns, strict=True)), flush=True)

    def markdown(self) -> str:
        """The table for a document."""
        lines = [[column.strip() for column in self.columns], ["---"] * len(self.columns), *self.rows]
        return f"### {self.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


@dataclass
class Report:
    """All tables, notes and checks of a run."""

    parts: list[Table | str] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    def table(self, title: str, *columns: str) -> Table:
        """Begin a table."""
        table = Table(title, columns)
        self.parts.append(table)
        print(f"\n{title}")
        table.show(columns)
        return table

    def note(self, text: str) -> None:
        """Add and print a paragraph."""
        self.parts.append(text)
        print(text, flush=True)

    def at_least(self, what: str, got: float, bar: float) -> None:
        """Hold a figure against a lower bound."""
        self.checks.append(Check(what, got, bar, at_most=False))

    def at_most(self, what: str, got: float, bar: float) -> None:
        """Hold a figure against an upper bound."""
        self.checks.append(Check(what, got, bar, at_most=True))

    @property
    def missed(self) -> list[Check]:
        """The checks whose bar is missed."""
        return [check for check in self.checks if not check.held]

    def markdown(self) -> str:
        """All parts, then the bars."""
        parts = [part if isinstance(part, str) else part.markdown() for part in self.parts]
        verdict = f"{len(self.checks)} bars, {len(self.missed)} missed" + (":\n" if self.missed else ".")
        return "\n\n".join(parts) + f"\n\n### Bars\n\n{verdict}\n" + "".join(f"\n- {check}" for check in self.missed)


def around_markers(path: Path, name: str) -> tuple[str, str]:
    """A document up to and including the comment `<!-- name: begin … -->`, and from `<!-- name: end -->` on.

    Raises:
        SystemExit: the document does not have both comments, once.
    """
    found = re.findall(
        rf"\A(.*<!-- {re.escape(name)}: begin[^>]*-->\n).*(<!-- {re.escape(name)}: end -->.*)\Z",
        path.read_text("utf-8"),
        re.DOTALL,
    )
    if len(found) != 1:
        raise SystemExit(f"{path}: expected the comments '{name}: begin' and '{name}: end', found {len(found)} pairs")
    return found[0]
