"""From a configuration and a task to a model."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn

from attemper.errors import ArgumentError
from attemper.examples.decoder import CausalSelfAttention
from attemper.lab.config import Model, RunConfig
from attemper.lab.models.attention import Attention
from attemper.lab.models.decoder import Decoder
from attemper.lab.models.example import check_example
from attemper.lab.models.translator import Translator
from attemper.lab.models.vision import Classifier
from attemper.lab.tasks.task import Task


def build(config: RunConfig, task: Task) -> nn.Module:
    """A model for the task, its weights drawn from torch's generator.

    Raises:
        ArgumentError: dials that this task's model does not have.
    """
    dials = config.model
    if dials.attention == "additive" and config.task.name != "reversal":
        raise ArgumentError("model.attention", f"'additive' for the task {config.task.name!r}", "'dot', or the task 'reversal'")
    if dials.attention == "additive" and config.precision.arithmetic != "fp32":
        given = f"{config.precision.arithmetic!r} for additive attention"
        raise ArgumentError("precision.arithmetic", given, "'fp32', or model.attention 'dot'")
    if dials.attention == "additive" and config.after.logit_factors:
        raise ArgumentError("after.logit_factors", "factors for additive attention", "none, or model.attention 'dot'")
    if not isinstance(dials.head_dim, int) and len(dials.head_dim) != dials.heads:
        expected = f"model.heads = {dials.heads} of them, or one number"
        raise ArgumentError("model.head_dim", f"{len(dials.head_dim)} widths", expected)
    if dials.attention == "example":
        check_example(config)
    if config.optimiser.qk_clip is not None:
        _check_clip(config.optimiser.qk_clip, dials)
    match config.task.name:
        case "digits":
            return Classifier(dials, task.classes, task.tokens)
        case "reversal":
            return Translator(dials, task.vocabulary, task.classes, task.tokens)
        case _:
            return Decoder(dials, task.vocabulary, task.classes, task.tokens)


def _check_clip(threshold: float, dials: Model) -> None:
    if not isinstance(dials.head_dim, int) and len(set(dials.head_dim)) > 1:
        given = f"{threshold:g} beside model.head_dim = {list(dials.head_dim)}"
        raise ArgumentError("optimiser.qk_clip", given, "heads of one width, or none")
    if dials.qk_norm or dials.rule == "cosine":
        given = f"{threshold:g} beside {'model.qk_norm' if dials.qk_norm else 'the rule cosine'}"
        raise ArgumentError("optimiser.qk_clip", given, "none: it clips weights, and a norm of q and k undoes that")


def attention_layers(model: nn.Module) -> dict[str, Attention | CausalSelfAttention]:
    """The layers whose logits have a scale, by name, in the model's order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Attention | CausalSelfAttention)}


@contextmanager
def logits_times(model: nn.Module, factor: float) -> Generator[None]:
    """Multiply the factor on the products of every attention layer by `factor` while the block runs; not of the examples' own."""
    layers = [layer for layer in attention_layers(model).values() if isinstance(layer, Attention)]
    for layer in layers:
        layer.logit_factor = factor
    try:
        yield
    finally:
        for layer in layers:
            layer.logit_factor = 1.0
