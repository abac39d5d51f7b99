"""How well an example model tells a text: −ln p(next byte), over rows of the model's context."""

from __future__ import annotations

import torch
from torch import Tensor

from attemper.examples.decoder import CONTEXT, Decoder
from attemper.examples.figures import next_byte_loss


def text_loss(model: Decoder, text: bytes) -> float:
    """Mean of −ln p(next byte) over a text cut into rows of the model's context, in nats.

    Args:
        model: an example model.
        text: of which what does not fill a row is left out.
    """
    rows = as_rows(text)
    with torch.no_grad():
        losses = torch.stack([next_byte_loss(model, chunk) * len(chunk) for chunk in rows.split(16)])
    return (losses.sum() / len(rows)).item()


def as_rows(text: bytes) -> Tensor:
    """A text cut into whole rows of the model's context: int64, [rows, tokens]."""
    return torch.tensor(list(text[: len(text) // CONTEXT * CONTEXT]), dtype=torch.int64).reshape(-1, CONTEXT)
