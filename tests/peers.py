"""Where the libraries of tests/peers.txt are, if they are installed."""

import os
import sys
from pathlib import Path

import pytest


def find() -> Path:
    """The folder to import them from; the test is skipped where it is absent."""
    root = Path(os.environ.get("ATTEMPER_PEERS", Path(sys.prefix) / "peers"))
    if not root.exists():
        pytest.skip(f"no {root}: pip install --no-deps --target {root} --requirement tests/peers.txt")
    return root
