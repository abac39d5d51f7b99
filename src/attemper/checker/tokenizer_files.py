"""Looks at a tokenizer's files before a library runs them: they are a small program, and may be a hostile one.

- no path in them is followed: vocabularies and merges lie in the folder, under their usual names;
- text does not grow without bound: replacements, one after another, multiply its length, and so the memory that it takes.
"""

from pathlib import Path
from typing import Any

from attemper.checker.folder import parse_json

# "e" → 1024 letters, or two replacements of 32: no normalizer in use comes near.
MAX_GROWTH = 1024
MAX_TEMPLATE = 256


def hostile(folder: Path) -> str:
    """Why the tokenizer of a folder should not be run, "" where nothing speaks against it.

    Raises:
        LoadError: a file of it is no JSON object, or gives a name twice.
    """
    settings = _read(folder / "tokenizer_config.json")
    outside = next((key for key in ("vocab", "merges") if isinstance(settings.get(key), str)), None)
    if outside is not None:
        return f"tokenizer_config.json names a file of its own choice as {outside}"
    described = _read(folder / "tokenizer.json")
    growth = 1
    for step in _steps(described.get("normalizer"), "normalizers"):
        if step.get("type") == "Replace":
            growth *= max(1, len(str(step.get("content", ""))))
    if growth > MAX_GROWTH:
        return f"its normalizer makes text up to {growth} times as long; at most {MAX_GROWTH} times is accepted"
    for step in _steps(described.get("post_processor"), "processors"):
        longest = max(len(pieces) if isinstance(pieces := step.get(key), list) else 0 for key in ("single", "pair"))
        if longest > MAX_TEMPLATE:
            return f"its post-processor adds {longest} pieces to each text; at most {MAX_TEMPLATE} are accepted"
    return ""


def _read(file: Path) -> dict[str, Any]:
    return parse_json(file.read_bytes(), file, "contents") if file.is_file() else {}


def _steps(part: Any, inner: str) -> list[dict[str, Any]]:
    """The steps of a part of tokenizer.json, the sequences in it unrolled."""
    found, remaining = [], [part]
    while remaining:
        step = remaining.pop()
        if isinstance(step, dict):
            found.append(step)
            nested = step.get(inner)
            remaining += nested if isinstance(nested, list) else []
    return found
