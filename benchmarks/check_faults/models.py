"""The tiny models that faults are planted into, and the same models whole: the sweep of the tests, randomly initialised."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

import attemper
from attemper.report import Report
from tests.capture import architectures, written_out

ROWS = architectures.ARCHITECTURES | written_out.ROWS
NAMES = tuple(ROWS)
TOKENS = ("decoder", "encoder", "encoder-decoder")  # kinds of models whose inputs are tokens, so that they can be padded
CAUSAL = ("decoder", "encoder-decoder", "speech")


@dataclass(frozen=True)
class Tiny:
    """One freshly built model and its inputs.

    Attributes:
        name: of the architecture; kind: as in `tests.capture.architectures.Architecture`.
        model, inputs: what `attemper.check` is given.
    """

    name: str
    kind: str
    model: nn.Module
    inputs: dict[str, Tensor]

    def check(self) -> Report:
        """The report on it, in the state that it is in."""
        return attemper.check(self.model, dict(self.inputs))

    @property
    def config(self) -> Any:
        """Its Hugging Face configuration."""
        return self.model.config

    @cached_property
    def before(self) -> Report:
        """The report before anything was planted, if it is asked for by then."""
        return self.check()

    @property
    def attention(self) -> tuple[str, ...]:
        """Modules that call attention, in the order in which they first do."""
        return tuple(dict.fromkeys(row.module for row in self.before.rows))

    @property
    def real(self) -> Tensor | None:
        """[batch, tokens] bool, False where the inputs are padding; None where nothing says so."""
        mask = self.inputs.get("attention_mask")
        return None if mask is None else mask.bool()


def build(name: str, *, padding: str = "right", dtype: torch.dtype = torch.float32, **config: Any) -> Tiny:
    """A model of the sweep in evaluation mode, and its inputs.

    Args:
        padding: "right", "left" or "none"; config: further fields of its configuration.
    """
    row = ROWS[name]
    model, inputs = architectures.build_row(row, attn=row.attn[0], padding=padding, gain=1.0, dropout=0.0, seed=7, **config)
    return Tiny(name, row.kind, model.to(dtype), inputs)
