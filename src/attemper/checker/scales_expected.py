"""Which scale a given attention module of a given model should apply, and how sure that is."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from attemper.checker.architectures import Architecture, architecture
from attemper.checker.scale_rules import Design, Site, inverse_sqrt, with_rope


@dataclass(frozen=True)
class ExpectedScale:
    """The scale that one attention module is held against.

    Attributes:
        design: the expected scale, taken apart; its value is the factor from the projections' q·k to the logits.
        rule: the rule in words; source: where it can be read.
        certain: the architecture is in the table or the module is torch's own; otherwise 1/sqrt(d_head) is only usual.
        architecture: the name under which the rule was found, "" where there was none.
    """

    design: Design
    rule: str
    source: str
    certain: bool
    architecture: str = ""

    @property
    def value(self) -> float | None:
        """The expected factor on q·k, or None where it is learned."""
        return self.design.value


def expected_scale(
    model: nn.Module, module_name: str, config: Any = None, *, head_dim: int, heads: int = 1, layer: int | None = None
) -> ExpectedScale:
    """The scale that the architecture of one attention module calls for.

    Args:
        model: the whole model; module_name: dotted name of the module that calls attention, "" for the model itself.
        config: configuration to use where neither the module nor anything around it has one.
        head_dim: width of q and k at the call; heads: number of query heads; layer: number of the layer, found if None.

    Returns:
        The expectation. An architecture that is not in the table gets 1/sqrt(d_head), not certain.
    """
    around = modules_around(model, module_name)
    module = around[0]
    if isinstance(module, nn.MultiheadAttention):
        source = "torch.nn.MultiheadAttention; Vaswani et al. 2017, section 3.2.1"
        return ExpectedScale(Design(head_dim**-0.5), "1/sqrt(d_head)", source, certain=True, architecture="MultiheadAttention")
    config = next((c for c in map(_config_of, around) if c is not None), config)
    site = Site(config, head_dim, heads, layer if layer is not None else _layer_of(module, module_name))
    for name in (type(module).__name__, getattr(config, "model_type", ""), _package_of(module)):
        row: Architecture | None = architecture(name) if isinstance(name, str) else None
        if row is not None:
            return _held_against(row.design(site), row.rule, row.source.format(name=name), site, name)
    source = "Vaswani et al. 2017, section 3.2.1; the architecture is not in attemper's table"
    return _held_against(inverse_sqrt(site), "1/sqrt(d_head)", source, site, "")


def _held_against(plain: Design, rule: str, source: str, site: Site, name: str) -> ExpectedScale:
    design = with_rope(plain, site)
    rule += "".join(f", times the {factor.name}" for factor in design.factors[len(plain.factors) :])
    return ExpectedScale(design, rule, source, certain=name != "", architecture=name)


def modules_around(model: nn.Module, name: str) -> list[nn.Module]:
    """The named module, then everything that holds it, innermost first. A name that does not exist means the model."""
    modules = [model]
    for part in filter(None, name.split(".")):
        inner = getattr(modules[-1], part, None)
        if not isinstance(inner, nn.Module):
            break
        modules.append(inner)
    return modules[::-1]


def _config_of(module: nn.Module) -> Any:
    config: Any = getattr(module, "config", None)
    kind = getattr(config, "model_type", None)
    return config if isinstance(kind, str) and kind else None


def _layer_of(module: nn.Module, name: str) -> int | None:
    index = getattr(module, "layer_idx", None)
    if isinstance(index, int):
        return index
    return next((int(part) for part in reversed(name.split(".")) if part.isdigit()), None)


def _package_of(module: nn.Module) -> str:
    parts = type(module).__module__.split(".")
    return parts[2] if parts[:2] == ["transformers", "models"] and len(parts) > 2 else ""
