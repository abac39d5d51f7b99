"""Which findings are wanted, where, and how grave they are held to be: what --select, --ignore and the configuration say."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Self

from attemper.checker.codes import is_selected, prefixes
from attemper.errors import ArgumentError
from attemper.report import Finding, Severity

Codes = str | Iterable[str]


@dataclass(frozen=True)
class Selection:
    """What the user wants to hear of.

    Attributes:
        select, ignore: codes and beginnings of codes; the longest that fits decides, and ignore wins a tie.
        per_layer: (glob, codes): findings with these codes are dropped in modules whose whole name the glob fits.
        severities: (code or beginning, severity): held to be so grave, whatever the rule says; the longest that fits decides.
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    per_layer: tuple[tuple[str, tuple[str, ...]], ...] = ()
    severities: tuple[tuple[str, Severity], ...] = ()

    @classmethod
    def of(
        cls,
        select: Codes | None = None,
        ignore: Codes | None = None,
        per_layer_ignores: Mapping[str, Codes] | None = None,
        severities: Mapping[str, str] | None = None,
    ) -> Self:
        """The selection that the arguments of `check` describe.

        Raises:
            ArgumentError: a code that fits no rule, a severity that there is none of, a glob without codes.
        """
        layers = []
        for glob, codes in _items("per_layer_ignores", per_layer_ignores, "codes by globs of module names"):
            unwanted = prefixes(f"per_layer_ignores[{glob!r}]", codes)
            if not unwanted:
                raise ArgumentError(f"per_layer_ignores[{glob!r}]", repr(codes), "one code or more")
            layers.append((glob, unwanted))
        graves = []
        for code, severity in _items("severities", severities, "severities by codes"):
            (prefix, *more) = prefixes("severities", code) or ("",)
            if more or not prefix:
                raise ArgumentError("severities", repr(code), "one code, or the beginning of one")
            if severity not in list(Severity):
                raise ArgumentError(f"severities[{code!r}]", repr(severity), f"one of {', '.join(Severity)}")
            graves.append((prefix, Severity(severity)))
        return cls(prefixes("select", select), prefixes("ignore", ignore), tuple(layers), tuple(graves))

    def apply(self, findings: Iterable[Finding]) -> tuple[Finding, ...]:
        """The findings that are wanted, as grave as the user holds them to be, errors first."""
        order = list(Severity)
        wanted = [self._graded(finding) for finding in findings if self.wants(finding.code, finding.module)]
        return tuple(sorted(wanted, key=lambda finding: (order.index(finding.severity), finding.code)))

    def wants(self, code: str, module: str) -> bool:
        """Whether a finding with this code, in this module, is wanted."""
        here = tuple(code for glob, codes in self.per_layer if fnmatchcase(module, glob) for code in codes)
        return is_selected(code, self.select, self.ignore) and not code.startswith(here or ("-",))

    def fits_nothing(self, modules: Iterable[str]) -> tuple[str, ...]:
        """The globs of per-layer ignores that fit none of these names: misspelt, or for another model."""
        names = list(modules)
        return tuple(glob for glob, _ in self.per_layer if not any(fnmatchcase(name, glob) for name in names))

    def _graded(self, finding: Finding) -> Finding:
        fitting = [(len(prefix), severity) for prefix, severity in self.severities if finding.code.startswith(prefix)]
        return replace(finding, severity=max(fitting)[1]) if fitting else finding


def layer_ignores(given: Iterable[str]) -> dict[str, list[str]]:
    """What --per-layer-ignore says: GLOB:CODES, split at the last colon; one glob may come several times.

    Raises:
        ArgumentError: a part is missing.
    """
    ignores: dict[str, list[str]] = {}
    for each in given:
        glob, _, codes = each.rpartition(":")
        if not glob or not codes.strip():
            raise ArgumentError("per_layer_ignores", repr(each), "GLOB:CODES, such as 'layers.0.*:ATT301,ATT302'")
        ignores.setdefault(glob, []).append(codes)
    return ignores


def _items(argument: str, given: Mapping[str, Any] | None, expected: str) -> list[tuple[str, Any]]:
    if given is None:
        return []
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise ArgumentError(argument, repr(given), expected)
    return list(given.items())
