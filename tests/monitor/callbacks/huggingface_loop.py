"""The Trainer of transformers that the tests of its callback train with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.monitor.callbacks.training import BATCH, RATE, examples, llama


def trainer_of(folder: Path, *callbacks: TrainerCallback, collate: Callable[..., Any] | None = None, **arguments: Any) -> Trainer:
    """One that trains as `plain` does: 4 steps of two batches each."""
    settings: dict[str, Any] = {
        "max_steps": 4,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": BATCH,
        "optim": "sgd",
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return Trainer(
        model=llama(),
        args=TrainingArguments(str(folder), **(settings | arguments)),
        train_dataset=examples(8 * BATCH),
        eval_dataset=examples(2 * BATCH),
        data_collator=collate,
        callbacks=list(callbacks),
    )
