"""The attention of the example models as a layer of the lab: PyTorch's own function computes it, with a number for a scale.

What it must hold:
- a training under it gives the weights that `attemper.examples.decoder.Decoder` would get, bit for bit: the same modules in the
  same order, so that they are drawn alike, and the same operations on them;
- a dial that it does not have is refused, never passed over.
"""

from __future__ import annotations

from attemper.errors import ArgumentError
from attemper.examples.decoder import CausalSelfAttention
from attemper.lab.config import Model, RunConfig
from attemper.lab.models.rules import rule_of
from attemper.scales import LogitShape

_TASKS = ("text", "recall")
_RULES = ("none", "inverse_sqrt", "inverse", "mup")


def check_example(config: RunConfig) -> None:
    """Refuse what this attention cannot do.

    Args:
        config: of a run with `attention="example"`.

    Raises:
        ArgumentError: another dial is set to what it does not have; the message names it.
    """
    dials = config.model
    width = dials.width // dials.heads
    fits = dials.width % dials.heads == 0 and width % 2 == 0
    for name, given, right, expected in (
        ("task.name", config.task.name, config.task.name in _TASKS, f"one of {', '.join(_TASKS)}, which a decoder learns"),
        ("precision.arithmetic", config.precision.arithmetic, config.precision.arithmetic == "fp32", "'fp32'"),
        ("model.rule", dials.rule, dials.rule in _RULES, f"one of {', '.join(_RULES)}, which are one number"),
        ("model.width", dials.width, fits, f"a multiple of 2·model.heads = {2 * dials.heads}"),
        ("model.head_dim", dials.head_dim, dials.head_dim == width, f"{width}, which is model.width / model.heads"),
        ("model.qk_norm", dials.qk_norm, not dials.qk_norm, "False"),
        ("model.softcap", dials.softcap, dials.softcap is None, "None"),
        ("model.position", dials.position, dials.position == "rotary", "'rotary'"),
        ("after.logit_factors", config.after.logit_factors, not config.after.logit_factors, "none"),
    ):
        if not right:
            raise ArgumentError(name, f"{given!r} for the attention of the examples", f"{expected}; or model.attention 'dot'")


def example_attention(config: Model, tokens: int) -> CausalSelfAttention:
    """A layer for dials that `check_example` has let pass.

    Args:
        config: the dials.
        tokens: length of the training examples.
    """
    width = config.width // config.heads
    factor = rule_of(config, tokens, causal=True).factor(LogitShape(width, config.heads, tokens, tokens, 0))
    assert isinstance(factor, float)
    return CausalSelfAttention(config.width, config.heads, factor)
