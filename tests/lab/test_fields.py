"""The table of fields in docs/lab.md is that of the configuration."""

import json
import types
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from attemper.lab.config import RunConfig
from tests.running import ROOT

BEGIN, END = "<!-- fields: begin, compared with attemper.lab.config by the tests -->", "<!-- fields: end -->"


def kinds(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) is types.UnionType or str(get_origin(annotation)) == "typing.Union":
        return " or ".join(kinds(part) for part in get_args(annotation))
    if get_origin(annotation) is tuple:
        return "a list of numbers"
    if hasattr(annotation, "__metadata__"):
        return kinds(get_args(annotation)[0])
    names = {int: "a whole number", float: "a number", bool: "`true`, `false`", str: "text", type(None): "none"}
    return names[annotation]


def rows(model: type[BaseModel], before: str = "") -> list[str]:
    found = []
    for name, field in model.model_fields.items():
        kind: Any = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found += rows(kind, f"{name}.")
        else:
            default = json.dumps(field.default) if not isinstance(field.default, tuple) else "[]"
            found.append(f"| `{before}{name}` | {kinds(kind)} | `{default}` |")
    return found


def table() -> str:
    return "\n".join(["| field | what it may be | default |", "|---|---|---|", *rows(RunConfig)])


def test_the_document_has_every_field() -> None:
    text = (ROOT / "docs" / "lab.md").read_text("utf-8")
    shown = text.partition(BEGIN)[2].partition(END)[0].strip()
    assert shown.startswith(table()), f"expected:\n{table()}"
