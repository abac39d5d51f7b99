"""The curves of a run, and the Parquet files that keep them: one row a step, and one row a head of a layer of a logged step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attemper.errors import LoadError, in_one_line
from attemper.monitor.records import FIGURES

if TYPE_CHECKING:
    import pyarrow as pa

STEPS, HEADS = "steps.parquet", "heads.parquet"
NAMES = tuple(figure.name for figure in FIGURES)
EACH_STEP = ("loss", "gradient_norm", "learning_rate", "loss_scale")


@dataclass(frozen=True, eq=False)
class Curves:
    """The training, one entry a step (float64; NaN where there is none).

    Attributes:
        loss, gradient_norm, learning_rate, loss_scale: [steps].
        steps: the steps at which the statistics were logged, [logged].
        figures: by the name of a figure of `attemper.monitor.records.FIGURES`, [logged, layers, heads].
        q_gradient, k_gradient: Frobenius norm of the loss's gradient in the weights that make q and k, [logged, layers].
        layers: names of the attention layers, in the model's order.
    """

    loss: Tensor
    gradient_norm: Tensor
    learning_rate: Tensor
    loss_scale: Tensor
    steps: Tensor
    figures: dict[str, Tensor]
    q_gradient: Tensor
    k_gradient: Tensor
    layers: tuple[str, ...]


def read_curves(folder: Path) -> Curves:
    """The curves of the run in that folder.

    Raises:
        LoadError: they are not what the lab wrote.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        steps, heads = (parquet.read_table(folder / name) for name in (STEPS, HEADS))
        return curves_from(steps, heads)
    except (OSError, KeyError, ValueError, RuntimeError, pa.ArrowException) as error:
        raise LoadError(f"{folder}: {in_one_line(error)}; expected the curves of a run") from error


def steps_table(tensors: dict[str, Tensor]) -> pa.Table:
    """One row a step."""
    import pyarrow as pa

    columns = {"step": list(range(len(tensors["loss"])))} | {name: tensors[name].tolist() for name in EACH_STEP}
    return pa.table(columns)


def heads_table(tensors: dict[str, Tensor], layers: tuple[str, ...], heads: int) -> pa.Table:
    """One row a head of a layer of a logged step; the gradients' norms are those of the layer."""
    import pyarrow as pa

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


def curves_from(steps: pa.Table, heads: pa.Table) -> Curves:
    """The inverse of `steps_table` and `heads_table`."""
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


def to_parquet(table: pa.Table) -> bytes:
    """A table as the bytes of a file; the same table gives the same bytes."""
    import pyarrow as pa
    from pyarrow import parquet

    sink = pa.BufferOutputStream()
    parquet.write_table(table, sink, compression="zstd")
    return sink.getvalue().to_pybytes()
