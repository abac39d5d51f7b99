"""`fold_scale`: the same function under another engine's scale."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attemper.errors import ArgumentError, UnsupportedError
from attemper.scales import LogitShape, Scale
from attemper.weights.edit import Edit, Edits
from attemper.weights.families import find_named
from attemper.weights.layout import Projections


@dataclass(frozen=True)
class FoldReport:
    """What `fold_scale` did.

    Attributes:
        edits: one for each parameter that was multiplied; none where both rules are the same number.
    """

    edits: tuple[Edit, ...]

    @property
    def exact(self) -> bool:
        """Whether nothing was rounded: every factor was a power of two, and no number fell below the dtype's normal ones."""
        return all(edit.exact for edit in self.edits)

    @property
    def rounding(self) -> float:
        """The largest relative error of a new number; 0 where exact."""
        return max((edit.rounding for edit in self.edits), default=0.0)

    def __str__(self) -> str:
        if not self.edits:
            return "nothing to fold: both rules give the same scale"
        factors = sorted({factor for edit in self.edits for factor in edit.factors})
        span = f"{factors[0]:.6g}" if len(factors) == 1 else f"{factors[0]:.6g} to {factors[-1]:.6g}"
        how = "exactly" if self.exact else f"rounded by up to {self.rounding:.1e} of a number"
        return f"{len(self.edits)} parameters multiplied by {span}, {how}"


def fold_scale(
    model: nn.Module,
    from_rule: Scale | Mapping[str, Scale],
    to_rule: Scale | Mapping[str, Scale],
    *,
    layouts: Mapping[str, Projections] | None = None,
) -> FoldReport:
    """Multiply q's projections in place, so that the model computes the same function under another engine's scale.

    W_q ← (from/to)·W_q, and its bias, for each head; or the gain of the norm behind it, with that norm's bias. Then
    to · (q·(from/to))·k = from · q·k: what is added to the logits after the scale, and the softcap, are as they were. Where the
    model runs with its own scale afterwards, it computes something else.

    Args:
        model: any module whose attention is in the table of families, or described in layouts.
        from_rule: what the model applies now. to_rule: what the other engine will apply. Each a rule of `attemper.scales`; or
            one for each attention module, by name, and modules that one of the two leaves out are left alone. A learned rule
            counts as it is now. One that needs the layer takes the module's `layer_idx`, or the one number in its name.
        layouts: see `find_projections`.

    Returns:
        What was multiplied by what, and how far that rounded. In 16-bit weights a factor that is no power of two rounds.

    Raises:
        UnsupportedError: a rule depends on position; it is meant for q and k divided by their lengths; heads that share one gain
            would need several factors; a projection computes more than W·x + b (an adapter); or a layout is unknown. Nothing was
            changed then, nor where an ArgumentError is raised.
        ArgumentError: a rule that is 0 or not finite, or was made for another number of heads.

    Source: Raffel et al. 2020 (T5, arXiv 1910.10683), whose models have 1/√d in W_q.
    """
    rules = (("from_rule", from_rule), ("to_rule", to_rule))
    named = {argument: set(rule) for argument, rule in rules if isinstance(rule, Mapping)}
    only = set.intersection(*named.values()) if named else None
    found = find_named(" and ".join(named), model, layouts, only)
    edits = Edits(model)
    for name, projections in found.items():
        one, other = (_rule(argument, rule, name) for argument, rule in rules)
        if projections.unfoldable:
            raise UnsupportedError(f"{name}: {projections.unfoldable}")
        layer = _layer(name, model.get_submodule(name))
        factors = _numbers("from_rule", one, projections, layer) / _numbers("to_rule", other, projections, layer)
        if projections.query.count == 1:
            if not bool((factors == factors[0]).all()):
                raise UnsupportedError(f"{name}: one gain for all heads cannot hold a factor for each: {factors.tolist()}")
            factors = factors[:1]
        edits.scale(name, projections.query, factors)
    return FoldReport(edits.write())


def _rule(argument: str, given: Scale | Mapping[str, Scale], name: str) -> Scale:
    rule = given[name] if isinstance(given, Mapping) else given
    if not isinstance(rule, Scale):
        raise ArgumentError(argument, repr(rule), "a rule of attemper.scales, such as InverseSqrt() or Constant(0.125)")
    if rule.depends_on_position:
        raise UnsupportedError(f"{argument}: {rule} depends on position, and weights do not: it cannot be folded")
    if rule.unit_operands:
        raise UnsupportedError(f"{argument}: {rule} is for q divided by its length, which no factor on the projection changes")
    return rule


@torch.no_grad()
def _numbers(argument: str, rule: Scale, projections: Projections, layer: int | None) -> Tensor:
    """float64 [heads]."""
    short = LogitShape(projections.head_dim, projections.heads, queries=1, keys=1, layer=layer)
    first, second = (
        torch.as_tensor(rule.factor(shape), dtype=torch.float64, device="cpu")
        for shape in (short, short._replace(queries=2, keys=5, offset=3))
    )
    if first.ndim > 1 or first.shape != second.shape or not torch.equal(first, second):
        raise UnsupportedError(f"{argument}: {rule} depends on position, and weights do not: it cannot be folded")
    if not bool((first.isfinite() & (first != 0)).all()):
        raise ArgumentError(argument, f"{rule}, a factor of {first.tolist()}", "finite factors other than 0")
    return first.expand(projections.heads) if first.ndim == 0 else first


def _layer(name: str, module: nn.Module) -> int | None:
    known = getattr(module, "layer_idx", None)
    if isinstance(known, int):
        return known
    numbers = [int(part) for part in name.split(".") if re.fullmatch(r"\d+", part)]
    return numbers[0] if len(numbers) == 1 else None
