"""A file in which choices of tiles outlive the process: one for each device and each version of what made them.

What it must hold:
- a reader sees a whole file or none, whoever writes at the same time, or ends in the middle of it; of two who write at once one
  may lose a choice, which another process then makes again;
- a file that cannot be read, or written, costs a warning and the time of choosing again, never the call.
"""

import hashlib
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

from attemper.errors import in_one_line
from attemper.files import write_whole

_FORMAT = 1
_LARGEST = 2**24  # bytes of a file; a choice takes some 300

Numbers = tuple[int, ...]


def cache_folder(environment: Mapping[str, str] = os.environ, platform: str = sys.platform) -> Path:
    """The folder for what attemper may lose: where the platform keeps such things of a user.

    Args:
        environment: variables by name, of which XDG_CACHE_HOME and LOCALAPPDATA are looked at; platform: as `sys.platform`.
    """
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 -- Path.home raises where a user has none, as in some containers
    home = home if home.is_absolute() else _temporary()
    if platform == "win32":
        base = Path(environment.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        given = environment.get("XDG_CACHE_HOME", "")
        base = Path(given) if Path(given).is_absolute() else home / ".cache"
    return base / "attemper"


def _temporary() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:  # nothing can be written anywhere: who tries it here will say so
        return Path(os.sep)


class ChoiceFile:
    """Choices, as tuples of whole numbers, by the text of their key.

    Args:
        folder: gives the folder, asked for when it is wanted; made: what made the choices, by name: versions and the device.
    """

    def __init__(self, folder: Callable[[], Path], made: dict[str, str]) -> None:
        self._folder, self._made = folder, made

    @property
    def path(self) -> Path:
        """Where the file is."""
        mark = hashlib.sha256(json.dumps(self._made, sort_keys=True).encode()).hexdigest()[:16]
        return self._folder() / f"triton-tiles-{mark}.json"

    def read(self) -> dict[str, Numbers]:
        """What is in the file, nothing where there is none; with a warning where it cannot be understood."""
        path = self.path
        try:
            return self._understood(json.loads(_text_of(path)))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError, RecursionError) as error:
            said = in_one_line(error) or type(error).__name__
            warnings.warn(f"attemper: {path}, the choices of tiles, is ignored: {said}; it will be written anew", stacklevel=2)
            return {}

    def add(self, key: str, choice: Numbers) -> None:
        """Put one more in, beside those that others have put in since."""
        path = self.path
        choices = {**self.read(), key: choice}
        text = json.dumps({"format": _FORMAT, **self._made, "tiles": choices}, indent=1)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text)
        except OSError as error:
            warnings.warn(f"attemper: a choice of tiles cannot be kept: {error}; it holds in this process", stacklevel=2)

    def _understood(self, content: object) -> dict[str, Numbers]:
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ValueError(f"not a file of format {_FORMAT}")
        if any(content.get(name) != value for name, value in self._made.items()):
            raise ValueError(f"not made by {self._made}")
        tiles = content.get("tiles")
        if not isinstance(tiles, dict) or not all(_whole(each) for each in tiles.values()):
            raise ValueError("a tile is not a list of whole numbers")
        return {key: tuple(each) for key, each in tiles.items()}


def _text_of(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise ValueError(f"more than {_LARGEST} bytes")
    return content.decode("utf-8")


def _whole(numbers: object) -> bool:
    return isinstance(numbers, list) and all(type(number) is int for number in numbers)
