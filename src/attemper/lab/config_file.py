"""From a TOML file, and what the command line sets, to configurations; what is wrong is said with its place.

seeds = [0, 1, 2]            # instead of `seed`: each configuration with each of them
[vary]                       # every combination of these
"model.rule" = ["none", "inverse_sqrt"]
[model]
head_dim = 64
"""

from __future__ import annotations

import itertools
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from attemper.errors import ArgumentError, LoadError
from attemper.lab.config import RunConfig

_LONGEST = 100  # letters of a value in an error
_LISTED = 4  # values that an error names


def read_configs(path: Path) -> tuple[RunConfig, ...]:
    """The runs that a file describes.

    Raises:
        LoadError: it cannot be read, is no TOML, or says something unknown or impossible.
    """
    try:
        fields = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise LoadError(f"{path}: {error.strerror}; expected a TOML file, or the name of a preset (attemper lab list)") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LoadError(f"{path}: {error}; expected TOML") from error
    seeds, vary = fields.pop("seeds", None), fields.pop("vary", {})
    if not isinstance(vary, dict) or not all(isinstance(values, list) and values for values in vary.values()):
        raise LoadError(f'{path}: [vary] is {vary!r}; expected lists by dotted names, such as "model.rule" = ["none"]')
    if seeds is not None:
        if "seed" in (*fields, *vary) or not isinstance(seeds, list) or not seeds:
            raise LoadError(f"{path}: seeds is {seeds!r}; expected a list of whole numbers, and no seed beside it")
        vary = {**vary, "seed": seeds}
    try:
        configs = [_checked(_with(fields, dict(zip(vary, values, strict=True)))) for values in itertools.product(*vary.values())]
    except ArgumentError as error:
        raise LoadError(f"{path}: {error}") from error
    return tuple(dict.fromkeys(configs))


def parsed(settings: Sequence[str]) -> dict[str, Any]:
    """What `--set name=value` says, by name.

    Args:
        settings: such as "model.rule=none" or "steps=100"; a value is JSON, or text where it is none.

    Raises:
        ArgumentError: a setting has no "=".
    """
    values: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise ArgumentError("--set", repr(setting), "NAME=VALUE, such as model.rule=none")
        try:
            values[name.strip()] = json.loads(text)
        except (ValueError, RecursionError):
            values[name.strip()] = text
    return values


def check_varied(configs: Sequence[RunConfig], values: Mapping[str, Any]) -> None:
    """Refuse to set a field in which the runs of a file differ, but for the seed, as a preset refuses those of its own runs.

    Args:
        configs: the runs of the file. values: what `parsed` gave.

    Raises:
        ArgumentError: the runs differ in one of the fields.
    """
    rows = [config.model_dump(mode="json") for config in configs]
    for name in values.keys() - {"seed"}:
        given = list(dict.fromkeys(json.dumps(_at(row, name)) for row in rows))
        if len(given) > 1:
            listed = ", ".join(given[:_LISTED]) + (", …" if len(given) > _LISTED else "")
            raise ArgumentError(
                "--set",
                f"{name}, of which the file has {len(given)} values ({listed})",
                "a field that is the same in all of its runs; or change the file",
            )


def _at(fields: Any, name: str) -> Any:
    for part in name.split("."):
        fields = fields.get(part) if isinstance(fields, dict) else None
    return fields


def override(configs: Sequence[RunConfig], values: Mapping[str, Any]) -> tuple[RunConfig, ...]:
    """The configurations with other values, each once.

    Args:
        configs: the runs.
        values: what `parsed` gave.

    Raises:
        ArgumentError: a name is unknown, or its value impossible.
    """
    if not values:
        return tuple(configs)
    return tuple(dict.fromkeys(_checked(_with(config.model_dump(mode="json"), values)) for config in configs))


def _with(fields: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(fields, default=str))
    for name, value in values.items():
        if isinstance(value, dict):  # it would set what it does not name back to the defaults
            raise ArgumentError(name, json.dumps(value), "a number, a text or a list; set the fields of a section one by one")
        *sections, last = name.split(".")
        place = made
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise ArgumentError(name, json.dumps(value), f"a field of a section; {section} is none")
        place[last] = value
    return made


def _checked(fields: Mapping[str, Any]) -> RunConfig:
    try:
        return RunConfig.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        # What pydantic appends of its own path, such as the member of a union, is no name that a user wrote.
        names = [str(part) for part in first["loc"]]
        known = _known(names)
        if first["type"] == "extra_forbidden":
            fields_there = ", ".join(_fields(names[:-1]))
            raise ArgumentError(".".join(names), _shown(first["input"]), f"a field that there is: {fields_there}") from None
        raise ArgumentError(known, _shown(first["input"]), first["msg"].removeprefix("Input should be ")) from None


def _known(names: list[str]) -> str:
    model: Any = RunConfig
    found = []
    for name in names:
        if not hasattr(model, "model_fields") or name not in model.model_fields:
            break
        found.append(name)
        model = model.model_fields[name].annotation
    return ".".join(found) or ".".join(names)


def _fields(names: list[str]) -> list[str]:
    model: Any = RunConfig
    for name in names:
        model = model.model_fields[name].annotation
    return list(model.model_fields)


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
