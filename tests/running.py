"""Where the repository is, and how a test runs a command in it."""

import os
import signal
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str) -> str:
    """What a command prints; the test fails unless it exits 0. A Python started here turns warnings into errors too."""
    environment = os.environ | {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb", "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, f"{command} exited {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def hear_ctrl_c() -> None:
    """Between fork and exec: what a shell starts in the background ignores SIGINT, and so would all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def named(path: Path) -> str:
    """A path as the repository's documents write it."""
    return str(path.relative_to(ROOT))
