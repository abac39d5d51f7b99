"""What `attemper check` says where a scale rule is mixed up with another: asked of its own judgement when the page is written."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from attemper.checker.scale import judged
from attemper.checker.scale_measured import Scaling
from attemper.checker.scale_verdict import Verdict
from attemper.checker.thresholds import DEFAULTS
from attemper.scales import LogitShape, Scale
from docs.pages.markdown import table
from docs.pages.scale_rule_texts import Words

_WIDTH, _HEADS = 64, 12
_QUERIES = 64  # the rules by position are given lengths of which so few positions are several
_USUAL = {
    "no scale": "Constant()",
    "1/√d": "InverseSqrt()",
    "1/d": "Inverse()",
    "√d": "Sqrt()",
    f"1/√{_WIDTH * _HEADS}, the width of the model": f"Constant({_WIDTH * _HEADS}**-0.5)",
}


def verdicts(rule: type[Scale], words: Words, made: Callable[[str], Scale]) -> str:
    """Both ways round: this rule called for and another applied, and this one applied where nothing is known.

    Args:
        rule: the class; words: on it; made: from how a rule is written to the rule.
    """
    parts = []
    if issubclass(rule, nn.Module):
        parts.append(
            "A learned factor has no number to be held against: of an architecture whose scale is known to be learned, check "
            "tells the range in a note."
        )
    elif words.config:
        rows = list(_mixed_up(words, made))
        fields = ", ".join(f"`{name}={value!r}`" for name, value in words.config.items() if name != "model_type")
        called = f"`{words.config['model_type']}`" + (f" with {fields}" if fields else "")
        where = f"A model of the architecture {called}, heads of width {_WIDTH}" + (
            f", layer {words.layer}" if words.layer else ""
        )
        if made(words.expected).depends_on_position:
            where += f", {_QUERIES} positions"
        parts.append(f"{where}, calls for `{words.expected}`. If something else is applied:")
        parts.append(table(("applied", "factor", "finding", "what is said"), rows))
    parts.append(_alone(rule, words, made))
    return "\n\n".join(parts)


def _alone(rule: type[Scale], words: Words, made: Callable[[str], Scale]) -> str:
    """The rule in a model of which check knows nothing."""
    written = words.calls[-1] if issubclass(rule, nn.Module) else words.expected or words.calls[0]
    found = _judged(nn.Module(), made(written), twice=False, layer=words.layer)
    said, cause = _said(found)
    if made(written).depends_on_position:
        unknown = "a factor that differs by position has nothing to be held against"
    else:
        unknown = "1/√d is assumed, less certainly"
    gives = f"`{written}` gives {said}" + (f" there, {found.severity}: {cause}." if found else ".")
    behind = " Behind norms on q and k it gives nothing." if found else ""
    return f"Where the architecture is not in check's table, {unknown}: {gives}{behind}"


def _mixed_up(words: Words, made: Callable[[str], Scale]) -> Iterator[tuple[str, str, str, str]]:
    module: Any = nn.Module()
    module.config, module.layer_idx = SimpleNamespace(**words.config), words.layer
    expected = made(words.expected)
    right = _factor(expected, words.layer)
    seen = []
    for called, written in (_USUAL | dict(words.aside) | {"the rule twice": words.expected}).items():
        twice = called == "the rule twice"
        factor = _factor(made(written), words.layer) ** (2 if twice else 1)
        if any(torch.allclose(factor, other) for other in (right, *seen)):
            continue
        seen.append(factor)
        found = _judged(module, made(written), twice, words.layer)
        number = " to ".join(dict.fromkeys(f"{each:.5g}" for each in (factor.min().item(), factor.max().item())))
        yield (called, number, *_said(found))


def _judged(module: Any, rule: Scale, twice: bool, layer: int) -> Verdict | None:
    factor = _factor(rule, layer) ** (2 if twice else 1)
    scaling = Scaling(_WIDTH, _HEADS, scale=factor, queries=_QUERIES)
    return next((verdict for _, verdict, _ in judged(module, getattr(module, "config", None), "", scaling, DEFAULTS)), None)


def _factor(rule: Scale, layer: int) -> torch.Tensor:
    """[1, heads, queries] where it differs by position, else 0-d; in float64."""
    shape = LogitShape(_WIDTH, _HEADS, queries=_QUERIES, keys=_QUERIES, layer=layer)
    factor = torch.as_tensor(rule.factor(shape)).detach().double()
    return factor.expand(1, _HEADS, _QUERIES) if rule.depends_on_position else factor.flatten()[0]


def _said(verdict: Verdict | None) -> tuple[str, str]:
    return ("nothing", "—") if verdict is None else (f"[{verdict.code}](../rules/{verdict.code}.md)", verdict.cause)
