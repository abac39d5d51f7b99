"""Compares the logits that a record describes with those that the model gave to its softmax.

Where they differ, a regression of the logits on the described ones tells whether they are merely another multiple of q·k.
"""

import torch
from torch import Tensor

from attemper.capture.arrangement import Arrangement
from attemper.capture.chains import Chain
from attemper.capture.record import HIDDEN

ROWS = 32  # of each sequence and head are compared: a step that was misread moves every row


def sample(arrangement: Arrangement, logits: Tensor) -> Tensor:
    """A few rows of the logits, copied: [batch, heads, rows, keys]."""
    placed = arrangement.place(logits, arrangement.axes.groups)
    return placed[:, :, :: stride(placed.shape[2])].clone()


def stride(queries: int) -> int:
    """Every so manieth row is compared."""
    return max(1, -(-queries // ROWS))


def disagreement(
    logits: Tensor,
    query: Tensor,
    key: Tensor,
    chain: Chain,
    described: tuple[float | Tensor, float | Tensor | None, Tensor | None],
) -> Tensor:
    """Whether any sampled logit differs from cap(scale · q·k) + bias by more than rounding: bool, no dimension, on the device.

    Each of n steps rounds its result by half an eps of the dtype that it is in, and the product its sum of |q|·|k|.
    """
    scale, softcap, bias = described
    dtype = torch.float32 if query.device.type == "mps" or query.dtype != torch.float64 else torch.float64
    step = stride(query.shape[2])
    rows, columns = query[:, :, ::step].to(dtype), key.to(dtype)
    columns = columns.repeat_interleave(rows.shape[1] // columns.shape[1], dim=1)
    if isinstance(scale, Tensor):
        scale = (scale[:, :, ::step] if scale.shape[2] > 1 else scale).to(dtype)
    logits = logits.to(dtype)
    capped = rows @ columns.mT * scale
    size = rows.norm(dim=-1).unsqueeze(-1) * columns.norm(dim=-1).unsqueeze(-2)
    size = size * (scale.abs() if isinstance(scale, Tensor) else abs(scale))
    if softcap is not None:
        capped = torch.tanh(capped / softcap) * softcap
    described_logits, hidden = capped, torch.zeros((), dtype=torch.bool, device=query.device)
    if bias is not None:
        bias = (bias[:, :, ::step] if bias.shape[2] > 1 else bias).to(dtype)
        described_logits, hidden = capped + bias, bias <= HIDDEN
    eps = _eps(chain, query)
    allowed = eps * (2 * size + (len(chain.steps) + 2) * (capped.abs() + logits.abs() + (described_logits - capped).abs()))
    allowed = allowed + 4 * torch.finfo(chain.coarsest).tiny
    close = (described_logits - logits).abs() <= allowed
    overflown = (logits == torch.inf) & (described_logits > torch.finfo(chain.coarsest).max / 2)
    return ~(close | logits.isnan() | (hidden & (logits <= HIDDEN)) | overflown).all()


def slope(
    logits: Tensor, query: Tensor, key: Tensor, described: tuple[float | Tensor, float | Tensor | None, Tensor | None]
) -> Tensor:
    """Least squares of the sampled logits, bias and cap undone, on the described scale · q·k: [heads], on the device.

    1 where the record is right. Over the visible pairs of each row, means of rows taken out: a softmax does not see them.
    """
    scale, softcap, bias = described
    dtype = torch.float32 if query.device.type == "mps" else torch.float64
    step = stride(query.shape[2])
    rows, columns = query[:, :, ::step].to(dtype), key.to(dtype)
    columns = columns.repeat_interleave(rows.shape[1] // columns.shape[1], dim=1)
    if isinstance(scale, Tensor):
        scale = (scale[:, :, ::step] if scale.shape[2] > 1 else scale).to(dtype)
    product, plain = rows @ columns.mT * scale, logits.to(dtype)
    visible = plain.isfinite() & (plain > HIDDEN)
    if bias is not None:
        bias = (bias[:, :, ::step] if bias.shape[2] > 1 else bias).to(dtype)
        visible = visible & (bias > HIDDEN)
        plain = plain - bias
    if softcap is not None:
        plain = torch.atanh((plain / softcap).clamp(-1 + 1e-6, 1 - 1e-6)) * softcap
    count = visible.sum(-1, keepdim=True).clamp(min=1)

    def centred(values: Tensor) -> Tensor:
        values = torch.where(visible, values, 0.0)
        return torch.where(visible, values - values.sum(-1, keepdim=True) / count, 0.0)

    product, plain = centred(product), centred(plain)
    squares = product.square().sum((0, 2, 3))
    return torch.where(squares > 0, (product * plain).sum((0, 2, 3)) / squares, 1.0)


def _eps(chain: Chain, query: Tensor) -> float:
    eps = torch.finfo(chain.coarsest).eps
    if query.is_cuda and torch.get_float32_matmul_precision() != "highest":
        return max(eps, 2.0**-10)  # TF32 keeps 10 bits of each operand
    return eps
