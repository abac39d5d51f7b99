"""The module and the Trainer of Lightning that the tests of its callback train with."""

from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from tests.monitor.callbacks.training import BATCH, RATE, llama, tokens


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = llama()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(input_ids=batch, labels=batch).loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("validation", self.net(input_ids=batch, labels=batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=RATE)


def trained(
    module: LightningModule, *callbacks: Callback, data: Tensor | None = None, path: Path | None = None, **arguments: Any
) -> Trainer:
    """After 4 steps of two batches each, as `plain` makes them."""
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "accumulate_grad_batches": 2,
        "logger": False,
        "log_every_n_steps": 1,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(callbacks=list(callbacks), **(settings | arguments))
    training = DataLoader(tokens(8 * BATCH) if data is None else data, batch_size=BATCH)
    trainer.fit(module, training, DataLoader(tokens(2 * BATCH), batch_size=BATCH), ckpt_path=path)
    return trainer
