"""Which models `--all` means: the checkpoints below a folder, or the lines of a list."""

import os
from pathlib import Path

from attemper.checker.folder import CONFIG, PICKLE_WEIGHTS, SAFE_WEIGHTS
from attemper.errors import LoadError

MAX_LIST_BYTES = 16 * 1024 * 1024


def find_models(place: Path) -> tuple[str, ...]:
    """Names of the models there.

    Args:
        place: a folder, in which every folder with a config.json and weights is one (links to folders are not followed), or a
            text file with one model a line: what `check` takes; empty lines and lines that begin with # are left out.

    Raises:
        LoadError: there is no such file or folder, or it holds none.
    """
    if place.is_dir():
        found = tuple(str(Path(folder)) for folder, _, files in sorted(os.walk(place)) if _is_checkpoint(files))
    elif place.is_file():
        found = _listed(place)
    else:
        raise LoadError(f"{place}: no such file or folder; expected a folder of checkpoints, or a text file with a model a line")
    if not found:
        raise LoadError(
            f"{place} names no model; expected folders with {CONFIG} and weights in it, or a text file with a model a line"
        )
    return tuple(dict.fromkeys(found))


def _is_checkpoint(files: list[str]) -> bool:
    return CONFIG in files and any(name in files for name in SAFE_WEIGHTS + PICKLE_WEIGHTS)


def _listed(file: Path) -> tuple[str, ...]:
    if file.stat().st_size > MAX_LIST_BYTES:
        raise LoadError(f"{file} has {file.stat().st_size} bytes; at most {MAX_LIST_BYTES} are read as a list of models")
    try:
        lines = file.read_text("utf-8").splitlines()
    except UnicodeDecodeError:
        raise LoadError(f"{file} is not UTF-8 text; expected a model a line") from None
    return tuple(line.strip() for line in lines if line.strip() and not line.strip().startswith("#"))
