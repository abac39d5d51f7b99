"""The text of PROVENANCE.md: how the examples were made and what their attention does."""

from __future__ import annotations

from torch import Tensor

from attemper.examples.decoder import BYTES, HEADS, HIDDEN, LAYERS, WIDTH, Decoder
from attemper.examples.figures import HeadFigures, measure

HEAD = """\
# The example models

Written by `{script}`; make it again with

    {command}

Two decoders over bytes that differ in one number, the factor on q·k: {scales}.
Text: {text} (the documentation of Python {python}, © Python Software Foundation, not kept here;
sha256 of both splits `{text_sha256}`; no paragraph is in both).
Model: {layers} layers, width {width}, {heads} heads of {head_width}, perceptrons of {hidden}, {bytes} bytes.
{parameters} parameters, stored as float16.
Initialisation: normal with variance 1 / inputs, so that q and k have unit variance at the start.
Recipe: AdamW, {steps} steps of {batch} × {context} bytes, learning rate {learning_rate:g} (warm-up {warmup}, then a cosine to a
twentieth), weight decay {weight_decay:g}, gradients clipped at {gradient_clip:g}, seed {seed}.
Run: torch {torch}, {machine}.{wider}

Losses of the weights as stored, in nats a byte:

| model | factor | training text | held-out text | passage of `example_inputs` |
|---|---|---|---|---|
"""

# Under these a processor with AVX-512 adds in the order of one without: torch's own loops, oneDNN's products, MKL's.
WIDER = """
An AMD EPYC with AVX-512 gives the same bytes under
`ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2`."""

TABLE = """
## {name}

On {rows} × {tokens} bytes of held-out text, logits in float64; rows with one visible key are left out. ‖∂q‖, ‖∂k‖ and ‖∂v‖ are
the norms of the loss's gradient in the three projections of the head.

| layer | head | max logit | std | saturated | entropy / ln n | gain | ‖∂q‖ | ‖∂k‖ | ‖∂v‖ |
|---|---|---|---|---|---|---|---|---|---|
"""


def summary(models: dict[str, Decoder], input_ids: Tensor) -> str:
    """PROVENANCE.md for a set of trained examples.

    Args:
        models: by name, each with its provenance.
        input_ids: bytes that the figures are measured on, [rows, tokens], int64.
    """
    records = {name: model.provenance for name, model in models.items() if model.provenance is not None}
    first = next(iter(records.values()))
    parts = [
        HEAD.format(
            **vars(first),
            wider=WIDER if "AVX2" in first.machine else "",
            scales=", ".join(f"{record.scale:g} in `{name}`" for name, record in records.items()),
            layers=LAYERS,
            width=WIDTH,
            heads=HEADS,
            head_width=WIDTH // HEADS,
            hidden=HIDDEN,
            bytes=BYTES,
            parameters=sum(parameter.numel() for parameter in next(iter(models.values())).parameters()),
        )
    ]
    parts += [
        f"| {name} | {record.scale:g} | {record.train_loss:.4f} | {record.validation_loss:.4f} | {record.passage_loss:.4f} |\n"
        for name, record in records.items()
    ]
    for name, model in models.items():
        parts.append(TABLE.format(name=name, rows=input_ids.shape[0], tokens=input_ids.shape[1]))
        parts += [row(figures) for figures in measure(model, input_ids)]
    return "".join(parts)


def row(figures: HeadFigures) -> str:
    """One line of a table."""
    return (
        f"| {figures.layer} | {figures.head} | {figures.logit_max:.1f} | {figures.logit_std:.1f} | {figures.saturated:.1%} "
        f"| {figures.entropy:.3f} | {figures.gain:.3f} | {figures.query_gradient:.1e} | {figures.key_gradient:.1e} "
        f"| {figures.value_gradient:.1e} |\n"
    )
