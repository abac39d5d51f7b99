"""Small runs of the lab, and results made up of a known outcome."""

import math
import os
import signal
from pathlib import Path

import torch

from attemper.lab.config import After, Model, Optimiser, Precision, RunConfig, Task
from attemper.lab.identity import run_id
from attemper.lab.store.curves import Curves
from attemper.lab.store.results import Evaluation, RunResult
from attemper.monitor.records import FIGURES

TASK = Task(length=13)
MODEL = Model(layers=2, heads=3, head_dim=6, width=10)


def tiny(seed: int = 0, **fields: object) -> RunConfig:
    """A run of a second: 11 steps of a decoder on text."""
    given: dict[str, object] = {"task": TASK, "model": MODEL, "steps": 11, "batch": 3, "evaluate_every": 4, "log_every": 2}
    return RunConfig.model_validate(given | {"seed": seed} | fields)


def made_up(
    config: RunConfig, loss: float, figures: dict[str, float] | None = None, after: dict[float, float] | None = None
) -> RunResult:
    """A run that ended with this loss (NaN: it diverged), each figure the same at every step."""
    diverged = math.isnan(loss)
    evaluations = [] if diverged else [Evaluation("validation", at, loss, 0.25) for at in (config.steps // 2, config.steps)]
    kind = "logit_factor" if config.after.logit_factors else "length"
    evaluations += [Evaluation(kind, at, value, 0.25) for at, value in (after or {}).items()]
    result = RunResult(
        id=run_id(config),
        config=config,
        status="diverged" if diverged else "done",
        ended=config.steps // 2 if diverged else config.steps - 1,
        evaluations=tuple(evaluations),
        seconds=1.0,
        tokens_per_second=1000.0,
        peak_mib=100.0,
        machine="a machine",
    )
    shape = (3, config.model.layers, config.model.heads)
    values = {figure.name: torch.full(shape, (figures or {}).get(figure.name, 0.5), dtype=torch.float64) for figure in FIGURES}
    steps = torch.full((config.steps,), 3.0 if diverged else loss, dtype=torch.float64)
    layer = torch.ones(3, config.model.layers, dtype=torch.float64)
    result.__dict__["curves"] = Curves(
        loss=steps, gradient_norm=torch.ones_like(steps), learning_rate=torch.ones_like(steps), loss_scale=torch.ones_like(steps),
        steps=torch.arange(3), figures=values, q_gradient=layer, k_gradient=layer,
        layers=tuple(f"blocks.{number}.attention" for number in range(config.model.layers)),
    )  # fmt: skip
    return result


def own_text(words: str) -> str:
    """A text of enough paragraphs to hold some out."""
    return "\n\n".join(f"Paragraph {number} has {words}." for number in range(97))


def die(_folder: Path, _config: RunConfig) -> None:
    """What a process of a pool does when the system takes it away."""
    os.kill(os.getpid(), signal.SIGKILL)


def files_of(folder: Path) -> dict[str, bytes]:
    """What a sweep left that must be the same however it was interrupted."""
    names = ("steps.parquet", "heads.parquet", "model.safetensors", "config.json")
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.name in names}
    assert found
    return found


__all__ = ["After", "Model", "Optimiser", "Precision", "Task", "die", "files_of", "made_up", "own_text", "tiny"]
