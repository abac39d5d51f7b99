"""Every rule once or more, with arguments that no default hides, for the tests that hold of all of them."""

import torch
from torch import nn

from attemper import scales
from attemper.scales import LogitShape, Scale

SHAPE = LogitShape(head_dim=19, heads=3, queries=7, keys=11, offset=4, layer=2)


def made(rule: Scale) -> Scale:
    """The rule with parameters that differ by head."""
    if isinstance(rule, nn.Module):
        with torch.no_grad():
            for parameter in rule.parameters():
                parameter.add_(torch.linspace(-0.4, 0.3, parameter.numel()).reshape(parameter.shape))
    return rule


def examples() -> list[Scale]:
    """Rules for `SHAPE`, made anew."""
    return [
        made(rule)
        for rule in (
            scales.Constant(),
            scales.Constant(-0.7),
            scales.InverseSqrt(),
            scales.Inverse(8.0),
            scales.Sqrt(),
            scales.InverseSqrtTerms(3),
            scales.InverseSqrtTerms(0.5),
            scales.QueryPreAttnScalar(17),
            scales.AttentionMultiplier(0.0625),
            scales.InverseLayer(),
            scales.InverseLayer(scales.Yarn(40.0), layer=5),
            scales.Yarn(40.0),
            scales.Yarn(40.0, mscale=0.7, mscale_all_dim=1.1, base=scales.Sqrt()),
            scales.Yarn(40.0, attention_factor=1.25),
            scales.LongRope(32.0, 4096),
            scales.MScale(40.0, 0.9),
            scales.Llama4(0.3, 3),
            scales.Ministral3(0.3, 3, base=scales.MScale(40.0)),
            scales.Inkling(0.4, 6.5),
            scales.Beam(0.4, 3.0),
            scales.Critical(1.5),
            scales.Critical(1.5, causal=False),
            scales.Learned(),
            scales.Learned(3, initial=1.3, base=scales.InverseLayer()),
            scales.Learned(3, base=scales.Llama4(0.3, 3)),
            scales.Cosine(),
            scales.Cosine(3, initial=5.0),
            scales.LogLength(),
            scales.LogLength(3),
            scales.LogLength(3, causal=False),
            scales.LogLength(3, base=scales.Inkling(0.4, 6.5)),
        )
    ]


EXAMPLES = examples()
