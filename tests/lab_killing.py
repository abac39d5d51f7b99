"""Kills sweeps with SIGKILL before each single thing that they ask of the file system: `python -m tests.lab_killing FOLDER`.

One process a thing, and each sweep is then gone on with to the end: what it leaves must be what an uninterrupted one leaves.
"""

import itertools
import os
import signal
import sys
from pathlib import Path

import torch
from pyarrow import parquet

from attemper.lab import sweep as sweeps
from attemper.lab import training
from attemper.lab.sweep import Sweep
from attemper.lab.table import TIMES
from tests.killing import die_before
from tests.lab_runs import MODEL, Task, files_of, tiny

_RUN = tiny(steps=3, evaluate_every=2, log_every=1, model=MODEL, task=Task(name="reversal", length=5))
SWEEP = Sweep("killed", "", "", (_RUN,))


def in_child(folder: Path, dies_before: int | None = None) -> bool:
    """Begin the sweep or go on with it in a process; whether it was killed."""
    pid = os.fork()
    if pid == 0:
        try:
            if dies_before is not None:
                die_before(dies_before, folder)
            sweeps.begin(folder, SWEEP)
            sweeps.run(folder)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or os.WEXITSTATUS(status) == 0
    return killed


def left_by(folder: Path) -> tuple[set[str], dict[str, bytes], object]:
    """All names but of a half-written sweep.json or table, the bytes that must be the same, the table without its times."""
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.parent != folder or path.name[0] != "."}
    return names, files_of(folder), parquet.read_table(folder / "table.parquet").drop_columns(list(TIMES)).to_pydict()


def main() -> None:
    place = Path(sys.argv[1])
    torch.set_num_threads(1)
    training.SAVE_EVERY = 0.0
    # Here, so that the children have all that is imported only when it is needed.
    sweeps.begin(place / "whole", SWEEP)
    sweeps.run(place / "whole")
    whole = left_by(place / "whole")
    for count in itertools.count():
        folder = place / f"sweep-{count}"
        if not in_child(folder, count):
            break
        in_child(folder, 7)  # killed again while it is gone on with
        assert not in_child(folder)
        assert left_by(folder) == whole, count
    sys.stdout.write(f"{count}\n")


if __name__ == "__main__":
    main()
