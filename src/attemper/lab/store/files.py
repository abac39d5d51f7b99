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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from torch import Tensor, nn

from attemper.errors import ArgumentError, LoadError
from attemper.lab.config import RunConfig
from attemper.lab.store.recorder import EACH_STEP, NAMES, Recorder
from attemper.lab.store.results import Curves, Evaluation, RunResult
from attemper.lab.store.state import replace
from attemper.monitor.trackers.locking import Lock

if TYPE_CHECKING:
    import pyarrow as pa


class RunFiles:
    """The files of the run `id` of the sweep in `folder`."""

    def __init__(self, folder: Path, id: str) -> None:
        self.id, self.folder = id, folder / "runs" / id
        self.checkpoint = self.folder / "checkpoint.safetensors"

    @contextmanager
    def opened(self, config: RunConfig) -> Iterator[None]:
        """Make the folder and hold it against other processes.

        Raises:
            ArgumentError: another process has it, or it cannot be made.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = Lock("out", self.folder)
            replace(self.folder / "config.json", config.model_dump_json(indent=1).encode())
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
            return RunResult(**_numbers(fields), folder=self.folder)
        except (OSError, ValueError, TypeError, KeyError, ValidationError) as error:
            raise LoadError(f"{path}: {one_line(error)}; expected the result of a run; delete it to train the run anew") from error

    def finish(self, result: RunResult, recorder: Recorder, model: nn.Module) -> None:
        """Write the results, that they are there last, and take the checkpoint away."""
        from safetensors.torch import save

        replace(self.folder / "steps.parquet", to_parquet(steps_table(recorder.tensors())))
        replace(self.folder / "heads.parquet", to_parquet(heads_table(recorder)))
        weights = {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}
        replace(self.folder / "model.safetensors", save(weights, {"run": self.id}))
        fields = asdict(result) | {"config": result.config.model_dump(mode="json")}
        del fields["folder"]
        replace(self.folder / "result.json", json.dumps(_null(fields), indent=1, allow_nan=False).encode())
        self.checkpoint.unlink(missing_ok=True)

    def curves(self) -> Curves:
        """Read back from the Parquet files.

        Raises:
            LoadError: they are not what the lab wrote.
        """
        import pyarrow as pa
        from pyarrow import parquet

        try:
            steps, heads = (parquet.read_table(self.folder / name) for name in ("steps.parquet", "heads.parquet"))
            return curves_from(steps, heads)
        except (OSError, KeyError, ValueError, RuntimeError, pa.ArrowException) as error:
            raise LoadError(f"{self.folder}: {error}; expected the curves of a run") from error


def to_parquet(table: "pa.Table") -> bytes:
    """A table as the bytes of a file; the same table gives the same bytes."""
    import pyarrow as pa
    from pyarrow import parquet

    sink = pa.BufferOutputStream()
    parquet.write_table(table, sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def steps_table(tensors: dict[str, Tensor]) -> "pa.Table":
    """One row a step."""
    import pyarrow as pa

    columns = {"step": list(range(len(tensors["loss"])))} | {name: tensors[name].tolist() for name in EACH_STEP}
    return pa.table(columns)


def heads_table(recorder: Recorder) -> "pa.Table":
    """One row a head of a layer of a logged step; the gradients' norms are those of the layer."""
    import pyarrow as pa

    tensors, layers, heads = recorder.tensors(), recorder.layers, recorder.heads
    logged, rows = tensors["steps"], len(tensors["steps"]) * len(layers) * heads
    columns: dict[str, Any] = {
        "step": logged.repeat_interleave(len(layers) * heads).tolist(),
        "layer": [name for _ in range(len(logged)) for name in layers for _ in range(heads)],
        "head": [head for _ in range(len(logged) * len(layers)) for head in range(heads)],
    }
    for place, name in enumerate(NAMES):
        columns[name] = tensors["figures"][:, place].flatten().tolist()
    for name in ("q_gradient", "k_gradient"):
        columns[name] = tensors[name].flatten().repeat_interleave(heads).tolist()
    assert all(len(column) == rows for column in columns.values())
    return pa.table(columns)


def curves_from(steps: "pa.Table", heads: "pa.Table") -> Curves:
    """The inverse of `steps_table` and `heads_table`."""
    import torch

    layers = tuple(dict.fromkeys(heads.column("layer").to_pylist()))
    width = 1 + max(heads.column("head").to_pylist(), default=-1)

    def shaped(name: str) -> Tensor:
        return torch.tensor(heads.column(name).to_pylist(), dtype=torch.float64).reshape(-1, max(1, len(layers)), max(1, width))

    logged = torch.tensor(heads.column("step").to_pylist(), dtype=torch.int64).reshape(-1, max(1, len(layers)) * max(1, width))
    each = {name: torch.tensor(steps.column(name).to_pylist(), dtype=torch.float64) for name in EACH_STEP}
    return Curves(
        **each,
        steps=logged[:, 0],
        figures={name: shaped(name) for name in NAMES},
        q_gradient=shaped("q_gradient")[..., 0],
        k_gradient=shaped("k_gradient")[..., 0],
        layers=layers,
    )


def one_line(error: Exception) -> str:
    """What an error says, its lines joined."""
    return " ".join(str(error).split())


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
    return {
        name: (math.nan if value is None else float(value)) if name in _FLOATS else value for name, value in fields.items()
    }
