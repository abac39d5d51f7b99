"""What a project wants of every check: `attemper.toml`, or `[tool.attemper]` in pyproject.toml, found upwards from here.

A file may choose what is reported and how. It cannot allow pickle or remote code: it is found without being asked for.
"""

import difflib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from attemper.checker.budget import size
from attemper.checker.options import DTYPES, Options
from attemper.checker.selection import Selection
from attemper.checker.thresholds import THRESHOLDS, Thresholds
from attemper.errors import ArgumentError, LoadError
from attemper.report.records import FAIL_ON

OWN_FILE, SHARED_FILE = "attemper.toml", "pyproject.toml"
Format = Literal["text", "json", "sarif", "github", "junit"]
FORMATS: tuple[str, ...] = get_args(Format)
_ON_THE_COMMAND_LINE = ("allow-pickle", "trust-remote-code", "model", "inputs")


@dataclass(frozen=True)
class Key:
    """One key of the configuration: its default, what it accepts in words, and what reads it (and raises ArgumentError)."""

    default: Any
    expected: str
    read: Callable[[Any], Any]


@dataclass(frozen=True)
class Settings:
    """What is in force.

    Attributes:
        values: for each key of `KEYS`; origins: where each comes from: "default", a file, or "command line".
        file: the configuration file, or None.
    """

    values: Mapping[str, Any]
    origins: Mapping[str, str]
    file: Path | None = None
    threshold_origins: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        return self.values[key]


def settings(flags: Mapping[str, Any], *, file: str | None = None, isolated: bool = False) -> Settings:
    """The defaults, under the configuration file, under what the command line gives.

    Args:
        flags: by key, None where it was not given. file: a configuration file by name. isolated: read none.

    Raises:
        ArgumentError: a key or a value that cannot be used; the message names the file and the key.
        LoadError: no such file, or not TOML.
    """
    if file is not None and isolated:
        raise ArgumentError("--config", repr(file), "no --isolated beside it: that reads no configuration")
    path = None if isolated else _named(file) if file is not None else _found(Path.cwd())
    values = {name: key.default for name, key in KEYS.items()}
    origins = dict.fromkeys(KEYS, "default")
    for name, value in (_table(path) if path is not None else {}).items():
        values[name], origins[name] = _checked(f"{path}: ", name, value), str(path)
    threshold_origins = dict.fromkeys(values["thresholds"], str(path))
    if values["baseline"] is not None and path is not None:
        values["baseline"] = str(path.parent / values["baseline"])  # wherever the command is started
    for name, value in flags.items():
        if value is None:
            continue
        given = _checked("--", name, value)
        if name == "thresholds":  # one by one: the others keep what the file says
            threshold_origins |= dict.fromkeys(given, "command line")
            given = values["thresholds"] | given
        values[name], origins[name] = given, "command line"
    return Settings(values, origins, path, threshold_origins)


def shown(found: Settings) -> list[str]:
    """What is in force, as TOML with the origin of each value behind it."""
    lines = [f"# configuration file: {found.file if found.file is not None else 'none'}"]
    for name, value in found.values.items():
        if isinstance(value, dict):
            continue
        text = f"# {name} is not set" if value is None else f"{name} = {_toml(value)}"
        lines.append(f"{text}  # {found.origins[name]}" if value is not None else text)
    for name in ("per-layer-ignores", "severities"):
        lines += [
            "",
            f"[{name}]",
            *(f"{_toml(key)} = {_toml(value)}  # {found.origins[name]}" for key, value in found[name].items()),
        ]
    lines += ["", "[thresholds]"]
    for name, value in Thresholds.of(found["thresholds"]).by_name().items():
        lines.append(f"{name} = {_toml(value)}  # {found.threshold_origins.get(name, 'default')}")
    return lines


def _named(file: str) -> Path:
    path = Path(file)
    if not path.is_file():
        raise LoadError(f"--config {file}: no such file; expected {OWN_FILE}, or a pyproject.toml with a table [tool.attemper]")
    if path.name == SHARED_FILE and _tool_table(path) is None:
        raise LoadError(f"--config {file}: it has no table [tool.attemper]")
    return path


def _found(folder: Path) -> Path | None:
    for here in (folder, *folder.parents):
        if (here / OWN_FILE).is_file():
            return here / OWN_FILE
        if (here / SHARED_FILE).is_file() and _tool_table(here / SHARED_FILE) is not None:
            return here / SHARED_FILE
    return None


def _table(path: Path) -> dict[str, Any]:
    if path.name != SHARED_FILE:
        return _parsed(path)
    return _tool_table(path) or {}


def _tool_table(path: Path) -> dict[str, Any] | None:
    tool = _parsed(path).get("tool")
    table = tool.get("attemper") if isinstance(tool, dict) else None
    if table is not None and not isinstance(table, dict):
        raise ArgumentError(f"{path}: tool.attemper", repr(table), "a table")
    return table


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise LoadError(f"{path} could not be read: {error.strerror}; --isolated reads no configuration") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise LoadError(f"{path} is not TOML: {error}; --isolated reads no configuration") from error


def _checked(where: str, name: str, value: Any) -> Any:
    key = KEYS.get(name)
    if key is None:
        if name in _ON_THE_COMMAND_LINE:
            raise ArgumentError(f"{where}{name}", "a key that no file may set", f"--{name} on the command line")
        near = difflib.get_close_matches(name, KEYS, 1)
        hint = f"{near[0]}?" if near else f"one of {', '.join(KEYS)}"
        raise ArgumentError(f"{where}{name}", "an unknown key", hint)
    try:
        return key.read(value)
    except ArgumentError as error:
        # Our own names for arguments say nothing to somebody who wrote a file; its key, and what stands inside, does.
        inner = error.argument[len(name) :] if error.argument.replace("_", "-").startswith(name) else ""
        raise ArgumentError(_place(where, name, inner), error.given, error.expected) from None
    except TypeError:
        raise ArgumentError(_place(where, name), repr(value), key.expected) from None


def _place(where: str, name: str, inner: str = "") -> str:
    """Where a value stands: "FILE: key", "FILE: key.inner", or the option that has it."""
    option = {"per-layer-ignores": "per-layer-ignore", "thresholds": "threshold"}.get(name, name)
    return f"--{option}{inner and ' '}{inner.strip('.[]')}" if where == "--" else f"{where}{name}{inner}"


def _codes(argument: str) -> Callable[[Any], list[str]]:
    def read(value: Any) -> list[str]:
        _require(isinstance(value, str) or (isinstance(value, list) and all(isinstance(each, str) for each in value)))
        return list(getattr(Selection.of(**{argument: value}), argument))

    return read


def _layers(value: Any) -> dict[str, list[str]]:
    _require(isinstance(value, dict))
    for codes in value.values():
        _require(isinstance(codes, str) or (isinstance(codes, list) and all(isinstance(each, str) for each in codes)))
    return {glob: list(codes) for glob, codes in Selection.of(per_layer_ignores=value).per_layer}


def _severities(value: Any) -> dict[str, str]:
    _require(isinstance(value, dict))
    return {code: str(severity) for code, severity in Selection.of(severities=value).severities}


def _thresholds(value: Any) -> dict[str, float]:
    _require(isinstance(value, dict))
    for name in value:
        if name not in (known := [each.name for each in THRESHOLDS]):
            near = difflib.get_close_matches(name, known, 1)
            raise ArgumentError(f"thresholds.{name}", "an unknown key", f"{near[0]}?" if near else f"one of {', '.join(known)}")
    Thresholds.of(value)
    return dict(value)


def _one_of(words: tuple[str, ...]) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        _require(isinstance(value, str) and value in words)
        return str(value)

    return read


def _tokens(value: Any) -> int:
    _require(type(value) is int)
    return Options(max_tokens=value).max_tokens


def _size(value: Any) -> "int | str":
    size(value)
    return value


def _path(value: Any) -> str:
    _require(isinstance(value, str) and value != "" and "\0" not in value)
    return str(value)


def _address(value: Any) -> str:
    _require(isinstance(value, str) and value.startswith(("https://", "http://")) and value.isprintable() and " " not in value)
    return str(value)


def _require(holds: bool) -> None:
    if not holds:
        raise TypeError


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
    return repr(value)


_LIST = "codes or beginnings of codes, in a list or with commas"
KEYS: dict[str, Key] = {
    "select": Key([], _LIST, _codes("select")),
    "ignore": Key([], _LIST, _codes("ignore")),
    "per-layer-ignores": Key({}, "a table: globs of module names, and the codes to ignore there", _layers),
    "severities": Key({}, "a table: codes, and error, warning or info", _severities),
    "fail-on": Key("error", f"one of {', '.join(FAIL_ON)}", _one_of(tuple(map(str, FAIL_ON)))),
    "dtype": Key(None, f"one of {', '.join(DTYPES)}", _one_of(DTYPES)),
    "max-tokens": Key(2048, "a whole number, 2 or more", _tokens),
    "max-memory": Key(None, "a size such as 800MB or 16GiB", _size),
    "output-format": Key("text", f"one of {', '.join(FORMATS)}", _one_of(FORMATS)),
    "baseline": Key(None, "the name of a file", _path),
    "docs-url": Key(None, "an address that begins with https:// or http://", _address),
    "thresholds": Key({}, "a table: names of thresholds, and numbers", _thresholds),
}
