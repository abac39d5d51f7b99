"""How far from the truth, which is the same attention in float64: ours beside PyTorch's, at the shapes that were timed."""

import torch
import torch.nn.functional as F
from torch import Tensor

import attemper
from benchmarks.attention_cpu.bars import Bars
from benchmarks.attention_cpu.cases import DTYPES, Shape, mask_name, masks, tensors
from benchmarks.report import Report


def measure(report: Report, bars: Bars, shapes: tuple[Shape, ...], dtypes: tuple[str, ...]) -> None:
    """One table: the largest error of the output and of the three gradients, one batch and head of each shape."""
    table = report.table(
        "Largest error against float64, one head",
        "Nq, Nk, D       ",
        "dtype   ",
        "mask  ",
        "output, SDPA",
        "ours   ",
        "ours / SDPA",
        "gradients, ours / SDPA",
    )
    for shape in shapes:
        one = shape._replace(batch=1, heads=1)
        for dtype in dtypes:
            for causal in masks(one):
                theirs, ours = both(one, dtype, causal)
                # The 16-bit gradients of PyTorch would take longer than everything else here.
                ratio, sizes = ours[0] / theirs[0], ", ".join(map(str, one[2:]))
                gradients = max(mine / other for mine, other in zip(ours[1:], theirs[1:], strict=True)) if ours[1:] else None
                table.add(
                    sizes,
                    dtype,
                    mask_name(causal),
                    f"{theirs[0]:.1e}",
                    f"{ours[0]:.1e}",
                    f"{ratio:.2f}",
                    "–" if gradients is None else f"{gradients:.2f}",
                )
                if dtype == "float32":
                    report.at_most(f"({sizes}) float32 {mask_name(causal)}: error, ours / SDPA", ratio, bars.error)


def both(shape: Shape, dtype: str, causal: bool) -> tuple[list[float], list[float]]:
    """PyTorch's largest errors and ours: of the output and, in float32, of the gradients of query, key and value."""
    gradients = dtype == "float32"
    leaves = tensors(shape, DTYPES[dtype], gradients=gradients)
    query, key, value = (leaf.detach().double().requires_grad_(gradients) for leaf in leaves)
    outputs = (
        F.scaled_dot_product_attention(query, key, value, is_causal=causal),
        F.scaled_dot_product_attention(*leaves, is_causal=causal),
        attemper.attention(*leaves, is_causal=causal, impl="cpu"),
    )
    truth, theirs, ours = ([output] for output in outputs)
    if gradients:
        upstream = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(2))
        truth += torch.autograd.grad(truth[0], (query, key, value), upstream.double())
        theirs += torch.autograd.grad(theirs[0], leaves, upstream)
        ours += torch.autograd.grad(ours[0], leaves, upstream)

    def errors(tensors: list[Tensor]) -> list[float]:
        return [(one.detach() - true.detach()).abs().max().item() for one, true in zip(tensors, truth, strict=True)]

    return errors(theirs), errors(ours)
