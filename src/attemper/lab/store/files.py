"""The folder of one run: its configuration, its checkpoint while it trains, and its results when it is over.

DIR/runs/ID/config.json              what it is
DIR/runs/ID/checkpoint.safetensors   where it stands; gone when it is over
DIR/runs/ID/steps.parquet            one row a step
DIR/runs/ID/heads.parquet            one row a head of a layer of a logged step
DIR/runs/ID/model.safetensors        the trained weights
DIR/runs/ID/result.json              the last to be written: a run is over if it is there
"""

from __future__ import annotations

import json
import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from attemper.errors import ArgumentError, LoadError, in_one_line
from attemper.files import write_whole
from attemper.lab.config import RunConfig
from attemper.lab.identity import run_id
from attemper.lab.store.curves import HEADS, STEPS, heads_table, steps_table, to_parquet
from attemper.lab.store.recorder import Recorder
from attemper.lab.store.results import Evaluation, RunResult
from attemper.monitor.trackers.locking import Lock


class RunFiles:
    """The files of the run called `name` of the sweep in `folder`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.id, self.folder = name, folder / "runs" / name
        self.checkpoint = self.folder / "checkpoint.safetensors"

    @contextmanager
    def opened(self, config: RunConfig) -> Generator[None]:
        """Make the folder and hold it against other processes.

        Raises:
            ArgumentError: another process has it, or it cannot be made.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = Lock("out", self.folder)
            for left in self.folder.glob(".*"):  # half written by a process that was killed
                left.unlink()
            write_whole(self.folder / "config.json", config.model_dump_json(indent=1).encode())
        except OSError as error:
            raise ArgumentError("out", f"{self.folder} ({error.strerror})", "a folder that can be written") from error
        try:
            yield
        finally:
            lock.release()

    def result(self) -> RunResult | None:
        """What the run came to; None while it is not over.

        Raises:
            LoadError: the file is not one that the lab wrote.
        """
        path = self.folder / "result.json"
        if not path.exists():
            return None
        try:
            fields: dict[str, Any] = json.loads(path.read_text("utf-8"))
            fields["config"] = RunConfig.model_validate(fields["config"])
            fields["evaluations"] = tuple(Evaluation(**_numbers(each)) for each in fields["evaluations"])
            return self._checked(RunResult(**_numbers(fields), folder=self.folder))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise LoadError(
                f"{path}: {in_one_line(error)}; expected the result of a run; delete it to train the run anew"
            ) from error

    def _checked(self, result: RunResult) -> RunResult:
        if result.id != self.id or run_id(result.config) != self.id:
            raise ValueError(f"it is that of the run {run_id(result.config)}")
        if result.status not in ("done", "diverged") or not isinstance(result.ended, int):
            raise ValueError(f"status is {result.status!r}, ended {result.ended!r}")
        if not isinstance(result.machine, str) or not isinstance(result.data, str):
            raise TypeError(f"machine is {result.machine!r}, data {result.data!r}")
        if result.status == "done" and math.isnan(result.loss):
            raise ValueError("it has no held-out loss")
        return result

    def finish(self, result: RunResult, recorder: Recorder, model: nn.Module) -> None:
        """Write the results, that they are there last, and take the checkpoint away."""
        from safetensors.torch import save

        tensors = recorder.tensors()
        write_whole(self.folder / STEPS, to_parquet(steps_table(tensors)))
        write_whole(self.folder / HEADS, to_parquet(heads_table(tensors, recorder.layers, recorder.heads)))
        weights = {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}
        write_whole(self.folder / "model.safetensors", save(weights, {"run": self.id}))
        fields = asdict(result) | {"config": result.config.model_dump(mode="json")}
        del fields["folder"]
        write_whole(self.folder / "result.json", json.dumps(_null(fields), indent=1, allow_nan=False).encode())
        self.checkpoint.unlink(missing_ok=True)


def load_weights(model: nn.Module, run: RunResult) -> None:
    """Give a model the weights that a run ended with.

    Args:
        model: with the run's parameters, by the same names. run: one that is over.

    Raises:
        LoadError: they cannot be read, or are not this model's.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    assert run.folder is not None
    path = run.folder / "model.safetensors"
    try:
        model.load_state_dict(load_file(path))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise LoadError(f"{path}: {error}; expected the weights of the run {run.id}") from error


def _null(value: Any) -> Any:
    """JSON has no NaN and no infinity: None and text stand for them."""
    if isinstance(value, dict):
        return {name: _null(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_null(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else repr(value)
    return value


_FLOATS = ("loss", "accuracy", "at", "seconds", "tokens_per_second", "peak_mib")


def _numbers(fields: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `_null`, for the fields that are numbers."""
    return {name: (math.nan if value is None else float(value)) if name in _FLOATS else value for name, value in fields.items()}
